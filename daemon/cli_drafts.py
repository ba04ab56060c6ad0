"""The daemon's options for drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from slotd.protocol.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--draft",
        "draft",
        envvar="SLOTD_DRAFT",
        metavar="FILE",
        help="GGUF of a DFlash draft model, instead of DRAFT; none = without one. One that does not fit is "
        "not used, and the daemon says why [default: the one that comes with slotd for TARGET, if any].",
    ),
    click.option(
        "--spec",
        default="auto",
        show_default=True,
        envvar="SLOTD_SPEC",
        metavar="MODE",
        help="What is guessed ahead and then verified, which changes no answer: chain or tree (by the draft "
        "model), ngram (what the text repeats), off, or auto: what is there, as far as it is faster.",
    ),
    click.option(
        "--budget",
        "--ddtree-budget",
        "budget",
        type=int,
        default=22,
        show_default=True,
        envvar="SLOTD_BUDGET",
        metavar="N",
        help="Most tokens that are guessed for a step of a request; a step has 64 rows in all. What a step "
        "needs of memory grows with it.",
    ),
    click.option(
        "--draft-block",
        type=int,
        envvar="SLOTD_DRAFT_BLOCK",
        metavar="N",
        help="Rows that the draft model is given, the pending token included [default: as it was trained].",
    ),
    click.option(
        "--draft-ctx",
        "--draft-ctx-max",
        "draft_ctx",
        type=int,
        default=2048,
        show_default=True,
        envvar="SLOTD_DRAFT_CTX",
        metavar="N",
        help="Tokens of a text that the draft model sees.",
    ),
    click.option(
        "--ddtree-temp",
        type=float,
        default=1.0,
        show_default=True,
        metavar="T",
        help="Temperature of the draft model where a tree is built; the answer's is another.",
    ),
    click.option(
        "--ddtree-chain-seed/--ddtree-no-chain-seed",
        "chain_seed",
        default=False,
        help="Begin each tree with the best candidate of every position [default: no].",
    ),
    click.option("--ddtree", is_flag=True, help="The same as --spec tree."),
)  # fmt: skip


def draft_options(command: F) -> F:
    """Give a command the options."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def choose_spec(flags: dict[str, Any]) -> str:
    """The mode that `--spec` and `--ddtree` mean together.

    Raises:
        ConfigError: they contradict each other.
    """
    spec: str = flags["spec"]
    if not flags["ddtree"]:
        return spec
    if spec not in ("auto", "tree"):
        raise ConfigError(f"--ddtree and --spec {spec[:40]} contradict each other")
    return "tree"
