"""Trained once: tokenizers of every kind and their codecs."""

import pytest

from tests.text.specimens import MAKERS, codec


@pytest.fixture(scope="session")
def tokenizers_by_kind():
    return {kind: make() for kind, make in MAKERS.items()}


@pytest.fixture(scope="session")
def codecs_by_kind(tokenizers_by_kind, tmp_path_factory):
    root = tmp_path_factory.mktemp("codecs")
    return {kind: codec(tokenizer, root / kind) for kind, tokenizer in tokenizers_by_kind.items()}
