"""The endpoints of models that pool as a part of the server."""

from collections.abc import Mapping
from typing import ClassVar

from engine.checkpoints.use import Kind
from server.extensions.pooling.classify import Classify
from server.extensions.pooling.cohere import CohereEmbed
from server.extensions.pooling.embeddings import Embeddings
from server.extensions.pooling.encode import SglangEncode
from server.extensions.pooling.infinity import InfinityClassify, InfinityEmbeddings, InfinityRerank
from server.extensions.pooling.labels import ScoreLabels
from server.extensions.pooling.nim import NimRanking
from server.extensions.pooling.pairs import Rerank, ScorePairs
from server.extensions.pooling.predict import TeiPredict
from server.extensions.pooling.raw import RawPooling
from server.extensions.pooling.tei import TeiEmbed
from server.run.extension import Extension, FirstRequest


class PoolingExtension(Extension):
    """Embeddings, labels, and scores of pairs."""

    endpoints = (
        Embeddings, CohereEmbed, TeiEmbed, SglangEncode, Classify, TeiPredict, ScorePairs, Rerank, NimRanking,
        InfinityEmbeddings, InfinityRerank, InfinityClassify, RawPooling, ScoreLabels,
    )  # fmt: skip
    first_requests: ClassVar[Mapping[Kind, FirstRequest]] = dict.fromkeys(
        ("embed", "classify"), (RawPooling.operation.path, {"input": "def fibonacci(n):"})
    )


EXTENSION = PoolingExtension()
