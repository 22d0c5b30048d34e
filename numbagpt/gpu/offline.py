"""What the compiler makes of a kernel, found out with no GPU.

    python -m numbagpt.gpu.offline [part of a kernel's name]

prints for every kernel and architecture what decides how fast it can be:

    registers   per thread; a multiprocessor has 65536, so 1024 resident threads can have 64 each
    stack       bytes of a thread's own memory: an array that could not be kept in registers
    spills      bytes of the instructions that store to and load from it because registers ran out
    shared      bytes of shared memory per block, dynamic shared memory not counted
    f64         float64 instructions: consumer GPUs run them at 1/64 of the speed of float32

Stack and spills go through the caches to main memory; they and f64 should be zero. Numba's compiler
writes PTX, a portable assembly language, and only has to be told for which architecture; `ptxas`,
from the CUDA compiler package, turns PTX into machine code and reports.
"""

if __name__ == "__main__":  # before the imports, so that Ctrl-C is answered while they last
    import sys

    from numbagpt import program

    sys.exit(program.run_module("numbagpt.gpu.offline"))

import importlib
import pkgutil
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from cuda.pathfinder import find_nvidia_binary_utility
from numba.core import types
from numba.core.typing.templates import Signature
from numba.cuda import dispatcher

import numbagpt.ops
from numbagpt import flags
from numbagpt.errors import UserError
from numbagpt.gpu.kernel import Kernel, all_kernels, stores_bf16

# Turing, Ampere, Hopper, Blackwell.
ARCHITECTURES = ((7, 5), (8, 0), (9, 0), (10, 0))


@dataclass(frozen=True)
class Resources:
    """What a kernel takes: registers and bytes of stack and spills per thread, shared per block.

    repairs counts the places where ptxas found a wgmma's registers used before it had finished, and
    made it finish first: right, but no longer asynchronous.
    """

    registers: int
    stack: int
    spills: int
    shared: int
    repairs: int


def program_kernels() -> list[Kernel]:
    """Every kernel of a training step, module by module."""
    modules = [f"numbagpt.ops.{m.name}" for m in pkgutil.iter_modules(numbagpt.ops.__path__)]
    for module in ["numbagpt.gpu.memset", *modules]:
        importlib.import_module(module)
    return [k for k in all_kernels() if k.__module__.startswith("numbagpt.")]


def architectures(kernel: Kernel, signature: Signature) -> list[tuple[int, int]]:
    """The compute capabilities that a kernel is meant for."""
    return [cc for cc in ARCHITECTURES if kernel.runs_on(cc, signature)]


def storage(signature: Signature) -> str:
    """A word that tells the signatures of one kernel apart: bf16 if any of its arrays stores it."""
    if stores_bf16(signature):
        return "bf16"
    return next(str(t.dtype) for t in signature.args if isinstance(t, types.Array))


def compile_ptx(kernel: Kernel, signature: Signature, compute_capability: tuple[int, int]) -> str:
    """PTX of a kernel for any architecture. Neither a GPU nor a driver is needed."""
    # Numba asks the driver for the GPU when it comes to a device function. Answer for it.
    device = SimpleNamespace(compute_capability=compute_capability)
    with mock.patch.object(dispatcher, "get_current_device", return_value=device):
        return kernel.ptx(signature, compute_capability)


def float64_instructions(ptx: str) -> list[str]:
    """The lines of PTX that compute, load, store or convert float64."""
    code = (line.split("//")[0].strip() for line in ptx.splitlines())
    return [line for line in code if ".f64" in line and not line.startswith(".reg")]


def assemble(ptx: str, architecture: str | None = None) -> Resources:
    """What ptxas reports for PTX that holds one kernel.

    architecture  such as "sm_90", where it is to be a newer one than the PTX was made for

    Raises UserError where there is no ptxas.
    """
    ptxas = find_nvidia_binary_utility("ptxas") or shutil.which("ptxas")
    if ptxas is None:
        raise UserError(
            "no ptxas found; it comes with the CUDA compiler package "
            "(pip install nvidia-cuda-nvcc-cu12, or nvidia-cuda-nvcc for CUDA 13) "
            "or with a CUDA toolkit whose bin folder is on the PATH"
        )
    architecture = architecture or re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE)[1]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        cubin = Path(folder, "kernel.cubin")
        command = [ptxas, "-v", f"-arch={architecture}", source, "-o", cubin]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"ptxas refused the kernel for {architecture}: {result.stderr.strip()}")
    return parse_report(result.stderr)


def parse_report(report: str) -> Resources:
    """Resources from what `ptxas -v` prints. Functions that were not inlined are counted in.

    The report has one pair of lines for each function:

        40 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
        Used 32 registers, used 1 barriers, 40 bytes cumulative stack size, 128 bytes smem

    and a line with a number from C7510 on for each repair.
    """

    def numbers(pattern: str) -> list[int]:
        return [int(n) for n in re.findall(pattern, report)]

    return Resources(
        registers=max(numbers(r"Used (\d+) registers")),
        stack=sum(numbers(r"(\d+) bytes stack frame")),
        spills=sum(numbers(r"(\d+) bytes spill (?:stores|loads)")),
        shared=sum(numbers(r"(\d+) bytes smem")),
        repairs=len(numbers(r"\(C(75\d\d)\)")),
    )


def inspect(kernel: Kernel, signature: Signature, compute_capability: tuple[int, int]) -> Resources:
    """Compile one kernel for one architecture and report what it takes."""
    return assemble(compile_ptx(kernel, signature, compute_capability))


def table(name: str = "") -> Iterator[str]:
    """The lines of the table of the kernels whose name holds `name`.

    Raises UserError if there is none.
    """
    chosen = [k for k in program_kernels() if name in k.__name__]
    if not chosen:
        raise UserError(f"no kernel's name holds {name!r}; run without a name to see them all")
    row = "{:44}{:9}{:>5}{:>11}{:>7}{:>8}{:>8}{:>5}"
    yield row.format("kernel", "storage", "cc", "registers", "stack", "spills", "shared", "f64")
    for k in chosen:
        for signature in k.signatures:
            for cc in architectures(k, signature):
                ptx = compile_ptx(k, signature, cc)
                r, float64 = assemble(ptx), len(float64_instructions(ptx))
                found = (r.registers, r.stack, r.spills, r.shared, float64)
                version = "{}.{}".format(*cc)
                yield row.format(k.__name__, storage(signature), version, *found)


def main(argv: list[str] | None = None) -> int:
    """Print the table; returns the exit status."""
    parser = flags.Parser(__doc__, prog="python -m numbagpt.gpu.offline")
    parser.add_argument("name", nargs="?", default="", help="part of a kernel's name")
    for line in table(parser.parse_args(argv).name):
        print(line, flush=True)
    return 0
