"""What the K/V of one token is: of how many layers and heads, how wide, and how it is stored."""

from __future__ import annotations

from dataclasses import dataclass

from slotd.daemon.kv.element_types import KvType, kv_type
from slotd.daemon.kv.pages import SEGMENT_PAGES
from slotd.daemon.ops.page_layout import PageLayout
from slotd.daemon.weights.architectures import HyperParameters
from slotd.daemon.weights.draft_file import DraftParameters


@dataclass(frozen=True, slots=True)
class KvShape:
    """Of one model's pages.

    Attributes:
        n_layer: layers that have K/V.
        n_head_kv: heads of each.
        head_dim, value_dim: numbers in a key and in a value.
        k_type, v_type: how they are stored.
    """

    n_layer: int
    n_head_kv: int
    head_dim: int
    value_dim: int
    k_type: KvType
    v_type: KvType

    @classmethod
    def of(cls, hyper: HyperParameters, k_type: str, v_type: str) -> KvShape:
        """That of a model, in types by name.

        Raises:
            ConfigError: not a K/V type.
        """
        n_layer = len(hyper.attention_layers)
        return cls(
            n_layer, hyper.n_head_kv, hyper.head_dim, hyper.value_dim, kv_type(k_type), kv_type(v_type)
        )

    @classmethod
    def of_draft(cls, draft: DraftParameters, name: str) -> KvShape:
        """That of a draft's context, in a type by name.

        Raises:
            ConfigError: not a K/V type.
        """
        kind = kv_type(name)
        return cls(draft.n_layer, draft.n_head_kv, draft.head_dim, draft.value_dim, kind, kind)

    @property
    def layout(self) -> PageLayout:
        """Where the bytes of a page lie."""
        k_row = self.k_type.format.row_bytes(self.head_dim)
        v_row = self.v_type.format.row_bytes(self.value_dim)
        return PageLayout(self.n_layer, self.n_head_kv, k_row, v_row, SEGMENT_PAGES)
