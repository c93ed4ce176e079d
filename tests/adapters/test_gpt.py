"""The GPT of hpczero.models as the training command sees it."""

from __future__ import annotations

from hpczero.adapters.gpt import GPTAdapter
from hpczero.models.config import GPTConfig, parameter_count
from tests.adapters.suite import AdapterSuite

SMALL = GPTConfig(layers=2, hidden=16, heads=2, vocab_size=7, context=8)


class TestGPT(AdapterSuite):
    @staticmethod
    def make() -> GPTAdapter:
        return GPTAdapter(SMALL)


def test_matrices_and_embeddings_decay_and_nothing_else() -> None:
    adapter = GPTAdapter(SMALL)
    names = [name for name, p in adapter.build().named_parameters() if adapter.decays(name, p)]
    assert "wte.weight" in names
    assert not [name for name in names if "norm" in name or name.endswith("bias")]
    assert sum(p.numel() for p in adapter.build().parameters()) == parameter_count(SMALL)
