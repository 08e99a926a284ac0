"""Every environment variable that this project reads or sets, and what it means.

A test compares the table with the code. A variable that sets a flag of `zero-agent` (`PET_<FLAG>`)
follows from the flag's name, and is not listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from zero_contract import worker

WORKER = "In a worker under zero-agent: torchrun's names"
WORKER_OURS = "In a worker under zero-agent: further names"
AGENT = "Read by zero-agent"
NOTICES = "Read by zero-agent, and in a worker without an agent: where it is said that it is to go"
COMMANDS = "Read by zero-ctl"
ENGINE = "Read in a worker"

VARIABLES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        AGENT: {
            "ZERO_JOIN_TOKEN": "Secret of a job (32 random characters or more), the same on all "
            "nodes. It gives access to the etcd that the job runs for itself; workers do not "
            "get it.",
            "ZERO_TOPOLOGY": "Where the node is in the network, the widest part first, such as "
            "block-1.rack-7: neighbours there become neighbours in rank.",
            "SLURM_TOPOLOGY_ADDR": "The same by Slurm, with the node at the end; ZERO_TOPOLOGY "
            "wins.",
            "SLURM_TOPOLOGY_ADDR_PATTERN": "What the parts of SLURM_TOPOLOGY_ADDR are.",
            "PYTHON_EXEC": "Interpreter of the workers (default: the agent's own, forked from "
            "the forkserver).",
            "CUDA_VISIBLE_DEVICES": "GPUs that the agent counts, checks and divides among its "
            "workers.",
            "_ARGCOMPLETE": "Set by a shell that asks for completions; see `zero-ctl completion`.",
            "NO_COLOR": "If it is set, --log-format=rank and --tee show no colours.",
            "TERM": "Type of the terminal; `dumb` shows no colours.",
            "TORCHELASTIC_HEALTH_CHECK_PORT": "Sets --health-port if that flag is not given.",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "Sets --shutdown-timeout if that flag is not given.",
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "What --tee puts before each line, with the "
            "placeholders ${role_name}, ${rank} and ${local_rank}.",
            "TORCHELASTIC_ENABLE_FILE_TIMER": "1 serves the workers' timers of "
            "torch.distributed.elastic.timer.",
            "OMP_NUM_THREADS": "Threads of each worker. With several workers on a node it is set "
            "to 1 if it is not given.",
            "PYTHONHASHSEED": "Decides the order of sets of text in the workers. It is set to 0 if "
            "it is not given: the order is then the same on all ranks and after a restart.",
            "TORCH_CPP_LOG_LEVEL": "Log level of torch's C++ code in the workers. It is set to "
            "ERROR if it is not given.",
            "GLOO_SOCKET_IFNAME": "Network interface of gloo in the workers. It is set to that of "
            "the node's address if it is not given.",
            "GRPC_VERBOSITY": "Log level of the agent's gRPC. It is set to NONE if it is not "
            "given.",
            "OTEL_EXPORTER_OTLP_ENDPOINT": "Collector of OpenTelemetry that gets traces of "
            "recoveries and saves, such as http://collector:4318; docs/operating.md names the "
            "variables that apply beside it.",
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "The same, as the whole URL for traces.",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf, if it is given: agents send traces by "
            "no other protocol.",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "The same, for traces.",
            "OTEL_TRACES_EXPORTER": "none: no traces are sent.",
            "OTEL_SDK_DISABLED": "true: no traces are sent.",
            "OTEL_SERVICE_NAME": "Name of the service in traces (default: zero-elastic).",
            "OTEL_RESOURCE_ATTRIBUTES": "Further attributes of the sender of traces.",
            "KUBEFLOW_TRAINER_SERVER_URL": "Where the progress of a TrainJob is posted; Kubeflow "
            "Trainer sets it.",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": "File of the authority of that server.",
            "KUBEFLOW_TRAINER_SERVER_TOKEN": "File with the token for it.",
            "XDG_STATE_HOME": "Directory below which an etcd that the agent runs keeps its data "
            "(default ~/.local/state).",
            "ETCD_UNSUPPORTED_ARCH": "The only ETCD_* variable that the agent passes on to an etcd "
            "that it runs.",
        },
        WORKER: {
            "RANK": "Number of the worker among all, from 0.",
            "LOCAL_RANK": "Number of the worker on its node, from 0.",
            "WORLD_SIZE": "Number of all workers of the round.",
            "LOCAL_WORLD_SIZE": "Number of workers on this node.",
            "GROUP_RANK": "Number of the node in the round, from 0.",
            "GROUP_WORLD_SIZE": "Number of nodes of the round.",
            "ROLE_NAME": "--role of the node.",
            "ROLE_RANK": "Number of the worker among those of its role.",
            "ROLE_WORLD_SIZE": "Number of workers of the role.",
            "MASTER_ADDR": "Address of the workers' store, which rank 0's agent serves.",
            "MASTER_PORT": "Port of the workers' store.",
            "TORCHELASTIC_RESTART_COUNT": "Restarts that the job has spent.",
            "TORCHELASTIC_MAX_RESTARTS": "--max-restarts of the job.",
            "TORCHELASTIC_RUN_ID": "Name of the job.",
            "TORCHELASTIC_USE_AGENT_STORE": "True: the agent serves the workers' store.",
            "TORCHELASTIC_ERROR_FILE": "File into which a worker that fails writes its traceback.",
            "TORCHELASTIC_TIMER_FILE": "Pipe of torch's file timers, if they are served.",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1 if it is not given: an NCCL error ends the "
            "worker. zero_engine and zero_torch change 1 to 0: the agent ends the worker.",
        },
        WORKER_OURS: {
            worker.ENV_JOB: "Name of the job.",
            worker.ENV_NODE: "Name of the node.",
            worker.ENV_RUN: "Id of the job's run, the same after every restart; checkpoints name "
            "it.",
            worker.ENV_ROUND: "Number of the round.",
            worker.ENV_FENCE: "Fence of the round: a commit of an older round is refused.",
            worker.ENV_STORE: "Id of the job's etcd: once a new one has followed it, a commit is "
            "refused.",
            worker.ENV_COMMITTED: "Newest committed step when the round began.",
            worker.ENV_COMMITTED_ROOT: "Directory or URL of the checkpoints that the job resumes "
            "from; a load that finds none there is an error, and no fresh start.",
            worker.ENV_SOCKET: "Unix socket of the agent.",
            worker.ENV_HEARTBEAT: "File that zero_agent.heartbeat() touches.",
            worker.ENV_LEAVE: "File that zero_agent.should_leave() makes; it returns True once the "
            "agent has made the file longer than 0 bytes.",
            worker.ENV_VOTE_KEY: "Key that signs what ranks write into the workers' store.",
            worker.ENV_LAUNCHER: "torchrun, if its plug-in `zero-etcd` is in the place of the "
            "agent: its signals are requests to leave.",
        },
        ENGINE: {
            "LOCAL_SIZE": "Number of workers on this node, as DeepSpeed's users set it on CPUs.",
            "ZERO_NEIGHBOURS": "0 makes ranks on one host exchange through sockets, not by "
            "reading each other's memory.",
            "ZERO_FOLD": "0 adds gradients on a GPU one by one, without a kernel that "
            "torch.compile makes of their additions; the result is the same.",
            "ZERO_NODE_RANKS": "Ranks of each node, in the order of ranks, such as 4,4,2; one "
            "number is that of every node (default: what the launcher says). Gradients are added "
            "inside a node before they travel to other nodes; the result is the same.",
            "TORCH_NCCL_ENABLE_MONITORING": "zero_engine and zero_torch set it to 0 under an "
            "agent, if it is not given: the agent ends a worker that hangs.",
            "DEEPSPEED_TIMEOUT": "Timeout of a collective, in minutes (default 10).",
        },
        NOTICES: {
            worker.ENV_LEAVE: "File that is not empty any more when the machine, or the pod, is "
            "to go: the step is finished and saved, and the process leaves.",
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": "Metadata server of AWS (default: "
            "http://169.254.169.254 on a machine of AWS).",
            "AWS_EC2_METADATA_DISABLED": "true: that of AWS is not asked.",
            "GCE_METADATA_HOST": "Metadata server of Google, as host:port.",
            "AZURE_POD_IDENTITY_AUTHORITY_HOST": "Metadata server of Azure, as a URL.",
        },
        COMMANDS: {
            "ZERO_JOIN_TOKEN": "Join token of a job: gives `zero-ctl` access to the etcd that the "
            "job runs for itself. `zero-ctl launch` generates a token if none is set; "
            "`zero-ctl certs` derives certificates from the token.",
            "_ARGCOMPLETE": "Set by a shell that asks for completions; see `zero-ctl completion`.",
            "DS_ENV_FILE": "File with variables for the hosts of `zero-ctl launch`, besides "
            ".deepspeed_env and .zero_env.",
            "PDSH_SSH_ARGS_APPEND": "Further arguments of ssh for `zero-ctl launch "
            "--launcher=pdsh`.",
        },
    }
)
"""Process that reads a variable or receives it -> name of the variable -> meaning."""
