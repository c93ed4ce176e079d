"""The adapters that come with hpczero and bring their own samples."""

from __future__ import annotations

from hpczero.adapters import recommender, regression, vision
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
