"""What the doctor says of a machine: containers, devices, number formats, each with its reason and its fix."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from chat import doctor_machine
from chat.doctor_machine import device, machine, main_memory, memory, versions
from chat.machine import core_quota, usable_cores
from chat.settings import Settings
from engine.room import memory_limit

GIB = 2**30


def settings(**changed) -> Settings:
    return Settings(**changed)


def cgroup(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text + "\n")
    return folder


def test_a_container_may_bound_cores_and_memory(tmp_path: Path) -> None:
    assert (core_quota(tmp_path), memory_limit(tmp_path)) == (None, None)
    free = cgroup(tmp_path, cpu_max="max 100000", memory_max="max")
    assert (core_quota(free), memory_limit(free)) == (None, None)
    bound = cgroup(tmp_path, cpu_max="150000 100000", memory_max=str(2 * GIB))
    assert (core_quota(bound), memory_limit(bound)) == (1.5, 2 * GIB)
    odd = cgroup(tmp_path, cpu_max="150000 0", memory_max="")
    assert (core_quota(odd), memory_limit(odd)) == (None, None)


def test_cores_are_those_that_may_be_used() -> None:
    assert 1 <= usable_cores() <= psutil.cpu_count()


def test_versions_name_what_is_installed_and_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = versions()
    assert finding.level == "ok"
    assert f"torch {torch.__version__}" in finding.detail
    monkeypatch.setattr(doctor_machine, "PACKAGES", ("torch", "no-such-package"))
    missing, found = versions()
    assert (missing.level, missing.detail) == ("problem", "no-such-package is not installed")
    assert "pip install -r requirements.lock" in missing.fix
    assert found.level == "ok"


@pytest.mark.parametrize(
    ("cores", "quota", "level", "fix"),
    [
        (1, None, "ok", ""),
        (8, None, "warn", "take OMP_NUM_THREADS out of the environment, unless other programs need the other cores"),
        (1, 0.5, "warn", "give the container more, or start Keepwarm with OMP_NUM_THREADS=1"),
        (1, 4.0, "ok", ""),
    ],
)
def test_threads_fit_the_cores(
    cores: int, quota: float | None, level: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(doctor_machine, "usable_cores", lambda: cores)
    monkeypatch.setattr(doctor_machine, "core_quota", lambda: quota)
    (finding,) = machine()
    assert (finding.level, finding.fix) == (level, fix)
    assert f", {cores} core" in finding.detail
    assert "1 thread for the model" in finding.detail


def test_a_compiler_is_missed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "compiler" not in [finding.what for finding in machine()]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    found = list(machine())[-1]
    assert (found.level, found.what) == ("warn", "compiler")
    assert found.detail.startswith("there is no C compiler (cc, gcc or clang)")
    assert "install one, such as gcc" in found.fix


def test_memory_is_what_this_process_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    total = psutil.virtual_memory().total
    capacity, free = main_memory()
    assert 0 < free <= capacity <= total
    monkeypatch.setattr(doctor_machine, "memory_limit", lambda: GIB // 2)
    assert main_memory()[0] == GIB // 2
    monkeypatch.setattr(doctor_machine, "main_memory", lambda: (GIB // 2, GIB // 4))
    (little,) = memory()
    assert (little.level, little.detail) == (
        "warn",
        "256 MiB of 512 MiB available, which is what the container may have",
    )
    assert little.fix == "close other programs before you start Keepwarm"


def test_the_device_is_named_with_its_reason() -> None:
    findings, found = device(settings(device="cpu", dtype="float32"), None)
    assert [(f.level, f.what, f.detail) for f in findings] == [
        ("ok", "device", "cpu, as set with device = cpu"),
        ("ok", "number format", "float32, as set with dtype = float32"),
    ]
    assert found is not None
    assert (found.name, found.dtype) == ("cpu", "float32")
    assert 0 < found.free <= found.capacity


def test_auto_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for multiplies, dtype, why in (
        (True, "bfloat16", "this CPU multiplies it"),
        (False, "float32", "this CPU has no AVX-512 BF16 and no AMX"),
    ):
        monkeypatch.setattr("engine.model.loading._cpu_multiplies_bf16", lambda now=multiplies: now)
        (place, kind), found = device(settings(), None)
        assert place.level == kind.level == "ok"
        assert place.detail.startswith("cpu; auto takes a CUDA GPU where there is one")
        assert kind.detail == f"{dtype}; auto takes bfloat16 where the CPU multiplies it, and {why}"
        assert found is not None
        assert found.dtype == dtype


def test_auto_keeps_the_format_of_the_first_start() -> None:
    (_, kind), found = device(settings(device="cpu"), "float16")
    assert kind.detail == "float16; auto keeps what it meant for this model at its first start"
    assert found is not None
    assert found.dtype == "float16"


def test_a_gpu_is_told_with_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA T1000")
    (place, kind), found = device(settings(), None)
    assert place.detail == "NVIDIA T1000, 20 GiB of 24 GiB free; auto takes a CUDA GPU where there is one"
    assert kind.detail == "bfloat16; auto takes bfloat16 where the GPU multiplies it, else float16"
    assert found == doctor_machine.Device("cuda", "bfloat16", 24 * GIB, 20 * GIB)


def test_a_gpu_that_torch_cannot_use_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor_machine, "NVIDIA", tmp_path)
    (place, _), _ = device(settings(), None)
    assert place.level == "warn"
    assert "there is an NVIDIA GPU" in place.detail
    assert place.fix.startswith("install torch with CUDA")


def test_a_device_that_is_not_there_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (finding,), found = device(settings(device="cuda"), None)
    assert (finding.level, found) == ("problem", None)
    assert "'cuda' is not available to this torch" in finding.detail
    assert finding.fix == "start with --device auto --dtype auto"


def test_the_bits_of_the_weights_are_told_with_their_reason() -> None:
    def told(dtype: str = "bfloat16", **changed: str) -> tuple[str, str, str]:
        (finding,) = doctor_machine.weights(settings(**changed), doctor_machine.Device("cpu", dtype, 4 * GIB, GIB))
        assert finding.what == "bits of weights"
        return finding.level, finding.detail, finding.fix

    for dtype in ("bfloat16", "float32"):
        detail = "auto takes as few as the model's own have, 4, 8 or 16, with a C compiler"
        assert told(dtype) == ("ok", detail, "")
    assert told(weights="int4") == ("ok", "int4, as set with weights = int4", "")
    assert told("float16") == ("ok", "those of float16; auto takes fewer only on a CPU in bfloat16 or float32", "")
    level, detail, fix = told("float16", weights="int8")
    assert (level, fix) == ("problem", "start with --weights auto")
    assert detail.startswith("weights 'int8' cannot be had in float16 on cpu: ")
