"""The endpoints of models that pool as a part of the server."""

from server.extensions.pooling.classify import Classify
from server.extensions.pooling.embeddings import Embeddings
from server.extensions.pooling.pairs import Rerank, ScorePairs
from server.extensions.pooling.raw import RawPooling
from server.run.extension import Extension


class PoolingExtension(Extension):
    """Embeddings, labels, and scores of pairs."""

    endpoints = (Embeddings, Classify, ScorePairs, Rerank, RawPooling)


EXTENSION = PoolingExtension()
