"""The adapters that come with hpczero and bring their own samples."""

from __future__ import annotations

from examples import bert, graph, recommender, regression, speech, vision
from tests.adapters.own_suite import OwnAdapterSuite


class TestRegression(OwnAdapterSuite):
    @staticmethod
    def make() -> regression.Regression:
        return regression.build(rows=40)


class TestResNet(OwnAdapterSuite):
    @staticmethod
    def make() -> vision.Stripes:
        return vision.resnet(size=8, width=8, rows=40)


class TestViT(OwnAdapterSuite):
    @staticmethod
    def make() -> vision.Stripes:
        return vision.vit(size=8, width=8, rows=40)


class TestDLRM(OwnAdapterSuite):
    @staticmethod
    def make() -> recommender.Clicks:
        return recommender.dlrm(users=31, rows=40)


class TestBERT(OwnAdapterSuite):
    @staticmethod
    def make() -> bert.MaskedWords:
        return bert.build(hidden=16, words=2, rows=60)

    @staticmethod
    def is_product(name: str) -> bool:
        # The others are looked up in, or used for some positions alone
        return name.startswith("blocks.")


class TestGCN(OwnAdapterSuite):
    @staticmethod
    def make() -> graph.Communities:
        return graph.gcn(nodes=45)


class TestGraphSAGE(OwnAdapterSuite):
    @staticmethod
    def make() -> graph.Communities:
        return graph.graphsage(nodes=45)


class TestSpeech(OwnAdapterSuite):
    @staticmethod
    def make() -> speech.Tones:
        return speech.build(hidden=16, layers=1, rows=40)


def test_errors_of_a_sequence_are_its_edit_distance() -> None:
    assert speech.errors([1, 2, 3], [1, 2, 3]) == 0
    assert speech.errors([], [1, 2]) == 2
    assert speech.errors([1, 3, 2, 2], [1, 2]) == 2
    assert speech.errors([2, 1], [1, 2]) == 2
    assert speech.errors([4, 1, 2, 3], [1, 2, 3]) == 1
