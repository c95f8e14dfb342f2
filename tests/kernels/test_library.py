"""The library of the kernels in C: its parts are those of the sources, and are compiled when a weight needs them."""

import threading
from random import Random
from subprocess import CalledProcessError

import pytest
import torch

from engine.host.cache_folder import cache_folder
from engine.kernels.blocks import Format, Parts, StoredWeight, block_products
from engine.kernels.compiled import compiled
from engine.kernels.cpu import cpu_kernels
from engine.kernels.library import Making, compiling
from engine.kernels.panels import PanelKind, PanelWeight, products
from engine.kernels.sources import LATER, SOURCES, TABLES, TILES, every_unit, parts_of, tables_of, units
from engine.settings.own_kernels import VARIABLE
from engine.types.errors import PluginError
from tests.kernels.stored_blocks import random_rows

pytestmark = pytest.mark.skipif(products() is None, reason="there is no C compiler, or no AVX2")


@pytest.fixture
def anew(monkeypatch, tmp_path):
    """A cache folder without a library, and a process that has loaded none."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled.cache_clear()
    yield
    compiled.cache_clear()


def num_kept() -> int:
    return len(list((cache_folder("kernels") or ()).glob("*.so")))


def test_every_format_of_blocks_has_a_table_and_every_table_a_unit_of_its_own() -> None:
    assert set(Format.__members__) <= set(TABLES)
    every = [table for of in TILES.values() for table in of]
    assert set(TABLES.values()) | {"pair_tiles"} == set(every)
    assert len(set(units(every))) == len(every)
    assert not {number for _, number in units()} - {0}
    assert tables_of(["Q8_0", "F32", "Q4_0", "Q8_0"]) == ("plain4", "plain8")


def test_a_model_has_what_it_needs_compiled_and_no_more() -> None:
    assert not {name for name, _ in units()} & {*LATER}
    assert {name for name, _ in every_unit()} == {*SOURCES}
    assert parts_of(["float32"], recurrent=False) == []
    assert parts_of(["bfloat16"], recurrent=True) == [("upper_tiles",), ("recurrent.c",)]
    assert parts_of(["Q4_1", "Q8_0"], recurrent=False) == [("minimum4", "plain8"), ("blocks.c",)]


def test_a_way_that_does_not_work_here_is_not_tried_again_at_each_start(monkeypatch, anew) -> None:
    tried = []

    def made(_compiler, flags, _units) -> bytes:
        tried.append(flags)
        if flags == ("-fopenmp",):
            raise CalledProcessError(1, "cc")
        return b"a library"

    monkeypatch.setattr("engine.kernels.sources.made", made)
    making = Making(["cc"], [("-fopenmp",), ()])
    with pytest.raises(CalledProcessError):
        making.keep()
    Making(["cc"], [()]).keep()  # as ``library`` does after it
    assert num_kept() == 1
    making.keep()
    assert tried == [("-fopenmp",), ()]


@pytest.mark.slow
def test_tiles_are_compiled_when_a_weight_needs_them_and_once(anew) -> None:
    found = products()
    blocks = block_products()
    assert found is not None
    assert blocks is not None
    weight_OI = torch.randn(8, 32)
    PanelWeight(found, weight_OI, PanelKind.FLOATS)
    assert num_kept() == 2  # one for all models, one for blocks
    PanelWeight(found, weight_OI, PanelKind.BYTES)
    PanelWeight(found, weight_OI, PanelKind.FINE_BYTES)
    assert num_kept() == 3
    stored = [random_rows(Random(1), kind, 8, 256) for kind in (Format.Q4_0, Format.Q6_K)]
    StoredWeight(blocks, stored, Parts.EXACT)
    StoredWeight(blocks, stored[:1], Parts.EXACT)
    assert num_kept() == 4


@pytest.mark.slow
def test_what_is_compiled_while_torch_is_imported_is_what_a_model_then_loads(monkeypatch, anew) -> None:
    with compiling(["bfloat16"], recurrent=False, for_cpu=False):
        pass
    assert not num_kept()
    with compiling(["bfloat16"], recurrent=False, for_cpu=True):
        assert threading.active_count() > 2
    assert num_kept() == 2
    with compiling(["Q4_1"], recurrent=True, for_cpu=True):
        pass
    assert num_kept() == 5
    monkeypatch.setattr("engine.kernels.sources.made", lambda *_: pytest.fail("compiled again"))
    found = products()
    assert found is not None
    PanelWeight(found, torch.randn(8, 32), PanelKind.UPPER_HALVES)
    blocks, kernels = block_products(), cpu_kernels()
    assert blocks is not None
    blocks.need(["Q4_1"])
    assert kernels is not None
    assert kernels.recurrences is not None


@pytest.mark.slow
def test_tiles_that_cannot_be_compiled_name_what_to_do(monkeypatch, anew) -> None:
    found = products()
    assert found is not None
    monkeypatch.setattr("engine.kernels.sources._run", lambda *_: (_ for _ in ()).throw(OSError("no compiler")))
    with pytest.raises(PluginError, match=r"half_tiles cannot be compiled.*no compiler.*CALLBOARD_KERNELS=torch"):
        found.need(PanelKind.HALVES)
