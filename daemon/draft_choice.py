"""Which drafts a daemon uses, from what was asked for and what there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slotd.daemon.config import Config
from slotd.daemon.draft_sources import ModelDrafter, NgramDrafter
from slotd.daemon.drafters import best_block, draft_for
from slotd.daemon.engine import Engine
from slotd.daemon.spec.adaptation import Mode
from slotd.daemon.speculation import Drafter

#: Arithmetic in which the bits of a row depend on the rows beside it: a larger step may choose another token
#: where two are equally good up to rounding.
ROWS_MATTER = "float32"


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """What guesses.

    Attributes:
        drafters: in the order in which they are asked.
        adapts: whether plain decoding takes over where it is faster.
        modes: what they are counted as.
        reason: why there is less than one might expect; None: nothing is missing.
    """

    drafters: tuple[Drafter, ...] = ()
    adapts: bool = False
    modes: tuple[Mode, ...] = ()
    reason: str | None = None

    def report(self, config: Config, engine: Engine) -> Mapping[str, Any]:
        """What HELLO and PROPS say of it."""
        draft = None
        if engine.drafts:
            draft = {
                "path": str(config.draft),
                "block": engine.drafting.block_size,
                "window": config.draft_ctx,
            }
        return {
            "spec": config.spec, "modes": [mode.value for mode in self.modes], "adapts": self.adapts,
            "budget": config.budget, "draft": draft, "reason": self.reason,
        }  # fmt: skip


def draft_path(config: Config, identity: str) -> Path | None:
    """The file of the draft that is loaded beside a target of this identity; None: none is wanted."""
    if config.spec in ("off", "ngram") or config.draft == "none":
        return None
    return draft_for(identity) if config.draft is None else Path(config.draft)


def choose_drafts(config: Config, engine: Engine) -> DraftChoice:
    """The drafters for `--spec`.

    auto: the draft model and n-grams, as far as they pay. Without a draft model n-grams alone, where a step
    of several rows computes what steps of one row do. The other modes do what they are called, always.
    """
    if config.spec == "off":
        return DraftChoice(reason="--spec off")
    if config.spec == "ngram":
        return DraftChoice((NgramDrafter(config.budget),), modes=(Mode.NGRAM,))
    missing = engine.drafting.refusal or "there is no draft model"
    if config.spec in ("chain", "tree"):
        if not engine.drafts:
            return DraftChoice(reason=missing)
        mode = Mode(config.spec)
        return DraftChoice((_model(config, engine, mode),), modes=(mode,))
    if engine.drafts:
        return DraftChoice(
            (_model(config, engine, Mode.CHAIN, Mode.TREE), NgramDrafter(config.budget)),
            adapts=True, modes=(Mode.CHAIN, Mode.TREE, Mode.NGRAM),
        )  # fmt: skip
    if engine.backend.math == ROWS_MATTER:
        return DraftChoice(
            reason=f"{missing}; n-grams would change roundings, --spec ngram or --exact allows them"
        )
    return DraftChoice((NgramDrafter(config.budget),), True, (Mode.NGRAM,), missing)


def _model(config: Config, engine: Engine, *modes: Mode) -> ModelDrafter:
    block, path = config.draft_block, engine.drafting.path
    if block is None and path is not None:
        block = best_block(path)
    return ModelDrafter(
        engine, modes, config.budget, block=block, temperature=config.tree_temperature,
        chain_seed=config.chain_seed,
    )  # fmt: skip
