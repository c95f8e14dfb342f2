"""What counts as an instruction of a compiled kernel."""

from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="triton is not published for this system")

from tests.no_gpu import order

PTX = """
.visible .entry red.atom.kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0
)
{
	.shared .align 16 .b8 red.smem[16];
	ld.param.b64 	%rd1, [kernel_param_0];
$L__red.0:                                // atom.global st.global red.
	.loc	1 44 8                          // griddepcontrol.wait
BEFORE
	// begin inline asm
	griddepcontrol.wait; // dummy %r6
	// end inline asm
	@%p1 st.global.v4.b32 [ %rd2 + 0 ], { %r1, %r2, %r3, %r4 };
	{ atom.global.gpu.acq_rel.add.u32 %r5, [ %rd3 ], 1;
	griddepcontrol.launch_dependents; // red.global
	ret;
}
"""


def found(before: str, ptx: str = PTX) -> dict[str, object]:
    kernel = SimpleNamespace(asm={"ptx": ptx.replace("BEFORE", before)}, metadata=SimpleNamespace(launch_pdl=True))
    return order(kernel)


def test_only_instructions_are_counted():
    assert found("	// red.global.add.u32 [ %rd1 ], 1; ld.global") == {
        "early": True, "waits": 1, "lets_next": 1, "lets_next_before": 0, "read_before": 0, "written_before": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("before", "reads", "writes"),
    [
        ("	ld.shared.b32 	%r1, [red.smem];", 0, 0),
        ("	@!%p2 st.shared.v2.b32 [ %r1 + 8 ], { %r2, %r3 };", 0, 0),
        ("	atom.shared.add.u32 	%r1, [red.smem], 1;", 0, 0),
        ("	redux.sync.add.s32 	%r1, %r2, -1;", 0, 0),
        ("	@%p2 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];", 1, 0),
        ("	cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;", 1, 0),
        ("	ld.b32 	%r1, [%rd1];", 1, 0),
        ("	red.global.add.u32 	[%rd1], 1;", 0, 1),
        ("	@%p2 atom.global.sys.release.exch.b32 %r1, [ %rd1 ], %r2;", 0, 1),
        ("{ 	st.release.sys.global.u32 	[%rd1], %r1;", 0, 1),
        ("	st.global.b32 	[%rd1], %r1;\n	red.relaxed.gpu.global.add.u32 	[%rd1], 1;", 0, 2),
    ],
)
def test_what_reaches_the_memory_of_other_kernels_is_counted(before: str, reads: int, writes: int):
    counted = found(before)
    assert (counted["read_before"], counted["written_before"]) == (reads, writes)


def test_a_kernel_that_does_not_wait_has_everything_before():
    counted = found("", PTX.replace("	griddepcontrol.wait;", "	// griddepcontrol.wait;"))
    assert (counted["waits"], counted["lets_next"], counted["lets_next_before"]) == (0, 0, 1)
    assert counted["written_before"] == 2
