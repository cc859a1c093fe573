"""README's example on the wheel for aarch64, under emulation: two minutes, by hand.

    python -m tests.native_harness.emulated_wheel WHEEL PREFIX

Needs qemu-aarch64, version 10 or later, and below PREFIX

- ``root``: Debian's arm64 packages of Python and the libraries that it needs, unpacked (``apt-get download``,
  ``dpkg -x``), and ``sys/devices/system/cpu/cpu0/regs/identification/midr_el1`` with 0x00000000413fd0c1;
- ``site``: the wheels of torch for aarch64 and of what it and this package need, unpacked (``pip download
  --platform manylinux_2_28_aarch64``). torch's is linked to CUDA's libraries, some 2.5 GB: for one that no
  index has, a library with its functions that do nothing will do.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Run behind README's example: the kernel of the wheel computes what the q-dq graph does.
CHECKS = """
import platform, torchq_compat
x = torch.randn(7, 3, 16)
exact, found = quantized.reference(x)[0], quantized(x)[0]
decibels = 10 * torch.log10(exact.square().sum() / (exact - found).square().sum())
print(platform.machine(), torchq_compat.__file__)
print(f"lowered beside its reference: {decibels:.1f} dB")
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("prefix", type=Path)
    options = parser.parse_args()
    root = options.prefix.resolve() / "root"
    _, _, example = (ROOT / "README.md").read_text().partition("```python\n")
    with tempfile.TemporaryDirectory() as directory:
        installed, cache = Path(directory, "installed"), Path(directory, "cache")
        tags = ["--platform", options.wheel.stem.split("-")[-1], "--python-version", "3.11"]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(installed), *tags]
        subprocess.run([*pip, "--only-binary", ":all:", "--no-deps", str(options.wheel)], check=True)
        libraries = ":".join(str(root / name / "aarch64-linux-gnu") for name in ("lib", "usr/lib"))
        emulator = [
            "qemu-aarch64",
            "-L",
            str(root),
            "-cpu",
            "neoverse-n1",
            "-E",
            f"LD_LIBRARY_PATH={libraries}",
        ]
        ran = subprocess.run(
            [*emulator, str(root / "usr/bin/python3.11"), "-c", example.partition("```")[0] + CHECKS],
            env={
                "PATH": os.environ["PATH"],
                "CXX": "",  # what is compiled would not be the wheel's
                "OMP_NUM_THREADS": "1",
                "PYTHONHOME": str(root / "usr"),
                "PYTHONPATH": f"{installed}:{options.prefix.resolve() / 'site'}",
                "TORCHQ_COMPAT_CACHE_DIR": str(cache),
            },
            cwd=directory,
            capture_output=True,
            text=True,
        )
        print(ran.stdout, ran.stderr, sep="\n")
        is_built_here = bool(list(cache.rglob("*.so")))
    on_kernel = "runs on the integer kernels of its kind" in ran.stdout and not is_built_here
    return ran.returncode or int(not on_kernel)


if __name__ == "__main__":
    sys.exit(main())
