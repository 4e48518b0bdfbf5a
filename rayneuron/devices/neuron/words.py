"""What to do about what the Neuron runtime and its compiler say. Pure.

Their words are those of the troubleshooting pages of SDK 2.28 and of reports; the runtime prints more to standard error than it raises.
"""

from __future__ import annotations

import re

from rayneuron.devices.neuron.releases import PINNED, SYSTEM, SYSTEM_PACKAGES

PRESENT = (
    "Load the driver (sudo modprobe neuron; dmesg), and give a container its devices (docker: --device /dev/neuron0 and so on; a pod: "
    "aws.amazon.com/neuron in its limits); `neuron-ls` must list them"
)
EFA = (
    "`fi_info -p efa -t FI_EP_RDM` must list it: install efa-installer, attach the instance's EFA interfaces (docker: --device "
    "/dev/infiniband/uverbs0 and so on; a pod: vpc.amazonaws.com/efa in its limits), let the security group send itself everything; "
    "`rayneuron neuron-check --stage group` asks step by step"
)
_MORE = "NEURON_RT_LOG_LEVEL=INFO makes the runtime say more"
# The first that fits counts.
_ADVICE = (
    (
        r"not available - Requested|not available: .*in use|in use by another process",
        "another process has these cores: `neuron-ls` and `rayneuron doctor` name it. End it, or start Ray with NEURON_RT_VISIBLE_CORES "
        "naming the others",
    ),
    (
        r"not compatible with the installed|requires Neuron Driver version|upgrade aws-neuronx?-dkms",
        "the driver is older than the runtime: install a newer aws-neuronx-dkms and load it while nobody uses a device (sudo rmmod neuron; "
        f"sudo modprobe neuron), or the runtime of SDK {PINNED.sdk}: apt-get install --allow-downgrades {SYSTEM_PACKAGES}",
    ),
    (
        r"determine Neuron Driver version|No neuron device|Could not open the nd|cannot determine the number of available",
        f"the runtime sees no device. {PRESENT}",
    ),
    (
        r"Runtime could not be initialized",
        "another process has these cores (`neuron-ls` and `rayneuron doctor` name it), or the driver is not there (`neuron-ls` must list "
        "the devices): the line before this one on standard error says which",
    ),
    (
        r"libnccom|cannot use collective operations",
        f"install the collectives of the same SDK: apt-get install 'aws-neuronx-collectives={SYSTEM['aws-neuronx-collectives']}.*'",
    ),
    (r"FI_EFA_FORK_SAFE", "export FI_EFA_FORK_SAFE=1 where Ray starts: this kernel is older than 5.15"),
    (
        r"Ofi plugin|OFI plugin|EFA is not enabled|is EFA enabled",
        f"EFA is not there. {EFA}",
    ),
    (
        r"Invalid NCCL_COMM_ID|No interface found in the same subnet|No usable listening interface",
        "the ranks cannot meet: NEURON_RT_ROOT_COMM_ID must be an address of a node that all others reach; where nodes have several "
        "networks, start Ray with the --node-ip-address of the one they share",
    ),
    (r"[Uu]nsupported topology", "the chip's links do not form this group: write another tensor_parallel"),
    (
        r"NEFF version|UNSUPPORTED_NEFF_VERSION|Unsupported hardware operator|latest aws-neuronx-runtime-lib",
        "these graphs were compiled by another SDK than this node's runtime: install the runtime of the SDK that compiled them "
        f"(SDK {PINNED.sdk}: apt-get install --allow-downgrades {SYSTEM_PACKAGES}), or compile again here",
    ),
    (
        r"NRT_LOAD_NOT_ENOUGH_NC|Could not find VNC|Insufficient number of NeuronCores",
        "the node has fewer cores than the deployment's ranks: `rayneuron doctor`; correct `instance:` or tensor_parallel",
    ),
    (
        r"HOST_MEM_ALLOC|Cannot allocate memory|bad_alloc",
        "the host's memory is used up: `rayneuron plan` says what a node needs; load fewer models",
    ),
    (
        r"NRT_RESOURCE|Failed to alloc|mempool|status 4\b",
        "the core's memory is used up: fewer buckets (each graph takes some), a lower max_num_seqs or max_model_len, kv_dtype: f8e4m3, or "
        "a higher tensor_parallel; `rayneuron plan` counts it",
    ),
    (
        r"COMPLETED_WITH_NUM_ERR|NUMERICAL|\b1003\b",
        "a number became NaN: weights that do not fit the dtype (dtype: fp32 shows it), or a fault of the graph, which is worth a report",
    ),
    (
        r"HW_ERR|\b120[0-3]\b|UNCORRECTABLE|abort state|UNRECOVERABLE",
        "the chip has failed: `dmesg | grep NEURON_HW_ERR`; stop and start the instance, which moves it to other hardware",
    ),
    (
        r"NRT_TIMEOUT|[Tt]imeout \(\d+ ms\)|status 5\b",
        "a step did not end in time: look for a rank that has failed on another node; a step that is longer by itself wants a higher "
        "NEURON_RT_EXEC_TIMEOUT",
    ),
)
_COMPILER = (
    (
        r"PJRT_Client_Create|num_devices > 0",
        "Torch-xla asked for a device and there is none: load the driver, or where no chip is meant to be, set PJRT_DEVICE=CPU beside "
        "NEURON_PLATFORM_TARGET_OVERRIDE",
    ),
    (
        r"F137|forcibly killed|failed with -9|code -9|exitcode=-9",
        "Memory ran out: write a lower compile.workers (1 is the least), compile where nothing else runs, or on a machine with more memory "
        "(NEURON_PLATFORM_TARGET_OVERRIDE compiles for a chip that is not there)",
    ),
    (
        r"(?s)\A(?!.*compile\.cache).*(No space left|Errno 28|Disk quota|Errno 122)",  # of the compiler's own work
        "The disk is full: name another folder or an s3:// address in compile.cache, or delete old entries; what was compiled is kept",
    ),
    (r"No such file or directory: 'neuronx-cc'|neuronx-cc: (command )?not found", "neuronx-cc is missing: activate the SDK's environment"),
)


def advice(problem: object) -> str:
    """What to do about an exception of the runtime, by its words."""
    return next((do for words, do in _ADVICE if re.search(words, str(problem))), _MORE)


def compiler_advice(problem: object) -> str:
    """The same of one of the compiler: a sentence, or nothing."""
    return next((f"{do}. " for words, do in _COMPILER if re.search(words, str(problem))), "")
