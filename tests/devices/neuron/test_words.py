"""What the runtime and the compiler say on a first day, as their troubleshooting pages print it, and what is said beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayneuron.devices.neuron import words
from rayneuron.devices.neuron.releases import SYSTEM
from rayneuron.devices.neuron.sdk import check_driver
from rayneuron.errors import CompileError, ConfigError, DeviceError
from tests.devices.neuron.test_device import SPACE, cores, opened, silent

SAID = [
    ("NRT:nrt_allocate_neuron_cores NeuronCore(s) not available - Requested:nc1-nc1 Available:0", "`neuron-ls` and `rayneuron doctor`"),
    ("NRT:nrt_init Unable to determine Neuron Driver version. Please check aws-neuron-dkms package is installed.", "modprobe neuron"),
    ("NRT:nrt_init This runtime requires Neuron Driver version 2.0 or greater. Please upgrade aws-neuron-dkms package.", "rmmod neuron"),
    ("This Neuron Runtime (compatibility id: 7) is not compatible with the installed aws-neuron-dkms package", "allow-downgrades"),
    ("The PyTorch Neuron Runtime could not be initialized. Neuron Driver issues are logged to your system logs.", "standard error"),
    ("TDRV:tdrv_get_dev_info No neuron device available", "--device /dev/neuron0"),
    ("NCCL init error: Error opening libnccom.so, cannot use collective operations!", "'aws-neuronx-collectives=2.30.*'"),
    ("Unable to run multi-instance workload.  Ofi plugin is not installed or EFA is not enabled", "vpc.amazonaws.com/efa"),
    ("OFI plugin initNet() failed is EFA enabled?", "fi_info -p efa"),
    ("Linux kernel 5.10 requires setting FI_EFA_FORK_SAFE=1 environment variable.", "export FI_EFA_FORK_SAFE=1"),
    ("WARN Invalid NCCL_COMM_ID [host:41211], please use format: <ipv4>:<port>", "NEURON_RT_ROOT_COMM_ID"),
    ("No interface found in the same subnet as remote address fe80::1461<45015>", "--node-ip-address"),
    ("NEFF version mismatch supported: 1.1 received: 2.0", "compiled by another SDK"),
    ("Unsupported hardware operator code 214 found in neff.", "compiled by another SDK"),
    ("Failed to load model: NRT_UNSUPPORTED_NEFF_VERSION (10)", "compile again here"),
    ("TDRV:db_vtpb_get_mla_and_tpb Could not find VNC id 3", "correct `instance:`"),
    ("TDRV:log_dev_mem Failed to allocate 172.000MB (usage: tensors) on ND 0:NC 0", "fewer buckets"),
    ("NRT_RESOURCE (4)", "fewer buckets"),
    ("NRT_FAIL_HOST_MEM_ALLOC (11)", "host's memory"),
    ("NRT_EXEC_COMPLETED_WITH_NUM_ERR (1003)", "NaN"),
    ("NRT_EXEC_HW_ERR_COLLECTIVES (1200)", "stop and start the instance"),
    ("NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR", "stop and start the instance"),
    ("(FATAL-RT-UNDEFINED-STATE) execution timeout (30000 ms) on Neuron Device 0 NC 0", "NEURON_RT_EXEC_TIMEOUT"),
    ("something that nobody has seen", "NEURON_RT_LOG_LEVEL=INFO"),
]


@pytest.mark.parametrize(("said", "do"), SAID, ids=[said[:40] for said, _ in SAID])
def test_what_the_runtime_says_is_answered(said: str, do: str) -> None:
    assert do in words.advice(RuntimeError(said))


def test_the_answer_stands_behind_what_it_says(standin: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While loading and while running."""
    from neuronx_distributed.trace.nxd_model import nxd_model, runtime

    from rayneuron.devices.idle import idle

    cores(monkeypatch, 1)
    device, program, shapes, _ = opened(standin, tiny, 1, model="chat")

    def fails(*_: object) -> None:
        raise RuntimeError("NRT_EXEC_HW_ERR_COLLECTIVES (1200)")

    with monkeypatch.context() as patched:
        patched.setattr(runtime, "claim", fails)
        with pytest.raises(DeviceError, match=r"chat: 1 ranks could not be loaded on cores 0 from .*1200\); the chip has failed"):
            device.compile(program, shapes[:1], silent)
    device, program, shapes, _ = opened(standin, tiny, 1, model="chat")
    device.compile(program, shapes[:1], silent)
    monkeypatch.setattr(nxd_model, "BEFORE", [fails])
    with pytest.raises(DeviceError, match=r"chat: graph decode_b2.* on cores 0 failed: .*1200\); the chip has failed"):
        device.start(shapes[0], idle(shapes[0], SPACE)).wait()


COMPILER = [
    ("neuronx-cc: [F137] was forcibly killed - This most commonly occurs due to insufficient system memory.", "lower compile.workers"),
    ("RuntimeError: neuronx-cc failed with -9", "lower compile.workers"),
    ("[Errno 28] No space left on device: '/tmp/x'", "another folder or an s3:// address in compile.cache"),
    ("Bad StatusOr access: INVALID_ARGUMENT: PJRT_Client_Create: error condition !(num_devices > 0):", "PJRT_DEVICE=CPU"),
    ("[Errno 2] No such file or directory: 'neuronx-cc'", "activate the SDK's environment"),
]


@pytest.mark.parametrize(("said", "do"), COMPILER, ids=[said[:30] for said, _ in COMPILER])
def test_what_the_compiler_says_is_answered(said: str, do: str) -> None:
    assert do in words.compiler_advice(said)
    assert words.compiler_advice("an operator that it does not take") == ""


def test_what_only_the_log_says_is_answered_too(cold: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from neuronx_distributed.trace import compiler

    cores(monkeypatch, 1)
    device, program, shapes, _ = opened(cold, tiny, 1, model="chat")

    def check(executable: object, flags: str, key: str) -> None:
        (log,) = (cold / "cache" / "builds").rglob(f"{key}/*/log-neuron-cc.txt")
        log.write_text(COMPILER[0][0])
        raise ValueError("exit code 70")  # the stand-in writes a RuntimeError into the log itself

    monkeypatch.setattr(compiler, "check", check)
    with pytest.raises(CompileError, match=r"exit code 70\)?\. Memory ran out: write a lower compile\.workers.*The compiler's log is "):
        device.compile(program, shapes[:1], silent)


def test_no_driver_is_said_before_anything_is_compiled(cold: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime says so when graphs are loaded. `rayneuron compile` needs no device."""
    cores(monkeypatch, 1)
    device, program, shapes, _ = opened(cold, tiny, 1, model="chat")
    monkeypatch.setattr("rayneuron.devices.neuron.sdk.imitated", lambda: False)
    asked: list[str] = []
    monkeypatch.setattr(type(device), "artifact", lambda *args: asked.append("compiled"))
    if not any(Path("/dev").glob("neuron[0-9]*")):
        with pytest.raises(ConfigError, match=r"no Neuron device.*modprobe neuron.*aws\.amazon\.com/neuron in its limits"):
            device.compile(program, shapes[:1], silent)
        assert asked == []
    (cold / "dev").mkdir()
    with pytest.raises(ConfigError, match="no Neuron device"):
        check_driver(False, cold)
    (cold / "dev" / "neuron11").write_text("")
    check_driver(False, cold)
    with pytest.raises(ConfigError, match=r"meet over EFA.*vpc\.amazonaws\.com/efa in its limits"):
        check_driver(True, cold)
    (cold / "dev" / "infiniband").mkdir()
    (cold / "dev" / "infiniband" / "uverbs0").write_text("")
    check_driver(True, cold)


@pytest.mark.parametrize(("ranks", "provider", "asked"), [(1, "efa", False), (2, "efa", True), (2, "tcp", False)])
def test_efa_is_asked_for_where_ranks_of_several_processes_meet_over_it(
    ranks: int, provider: str, asked: bool, standin: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores(monkeypatch, 1)
    monkeypatch.setenv("FI_PROVIDER", provider)
    device, program, shapes, _ = opened(standin, tiny, ranks, local_ranks=1)
    seen: list[bool] = []
    monkeypatch.setattr("rayneuron.devices.neuron.device.check_driver", lambda efa: seen.append(efa))
    monkeypatch.setattr(type(device), "artifact", lambda *args: None)
    device.prepare(program, shapes, silent)
    assert seen == [asked]


def test_the_packages_it_names_are_those_of_one_sdk() -> None:
    assert [name for name in SYSTEM if f"'{name}={SYSTEM[name]}.*'" in words.advice("NEFF version mismatch")] == list(SYSTEM)
