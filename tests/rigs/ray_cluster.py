"""A Ray cluster of two nodes on this machine; the second does not see a folder of the first."""

import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_SMALL = 80 << 20  # bytes of each object store
_START_S = 60.0


class Node:
    """A node in a process group of its own, which starts in an empty folder.

    Args:
        hidden: folder that is empty for it, where the system allows that; the node cannot write to this machine's.
        variables: environment variables that it has besides this process's; None removes one.
    """

    def __init__(
        self, address: str, hidden: Path, *, cpus: int = 2, variables: Mapping[str, str | None] | None = None
    ) -> None:
        self.folder = hidden.parent / f"{hidden.name}-node-{time.monotonic_ns()}"
        self.folder.mkdir()
        start = f"exec ray start --address={address} --num-cpus={cpus} --object-store-memory={_SMALL} --block"
        command = ["bash", "-c", start]
        if can_hide():
            script = f"mount -t tmpfs none '{hidden}' && {start}"
            command = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", script]
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        for name, value in (variables or {}).items():
            environment.pop(name, None)
            environment |= {} if value is None else {name: value}
        before = {node["NodeID"] for node in nodes()}
        self.process = subprocess.Popen(
            command, cwd=self.folder, env=environment, start_new_session=True, stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.id = _joined(before)

    def kill(self) -> None:
        """Kills the node with all its processes, as a machine that loses power."""
        for pid in [*_descendants(self.process.pid), self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _descendants(pid: int) -> list[int]:
    """Processes that a process started, directly or not, as far as it or the one between lives."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = stat.read_text().rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    found = children.get(pid, [])
    for child in found:  # it grows
        found += children.get(child, [])
    return found


def nodes() -> list[dict[str, Any]]:
    ray: Any = importlib.import_module("ray")
    return list(ray.nodes())


def can_hide() -> bool:
    """Whether this system allows mounts in a namespace of the user's."""
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(command, capture_output=True).returncode == 0


def _joined(before: set[str]) -> str:
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        for node in nodes():
            if node["Alive"] and node["NodeID"] not in before:
                return str(node["NodeID"])
        time.sleep(0.1)
    raise TimeoutError("the second node of the Ray cluster did not start")


@contextmanager
def two_nodes(hidden: Path, *, cpus: int = 2) -> Iterator[tuple[Any, Node]]:
    """A cluster that this process is connected to, and its second node."""
    ray: Any = importlib.import_module("ray")
    utilities: Any = importlib.import_module("ray.cluster_utils")
    head = {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": _SMALL}
    cluster = utilities.Cluster(initialize_head=True, head_node_args=head)
    node = None
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        node = Node(cluster.address, hidden, cpus=cpus)
        yield cluster, node
    finally:
        if node is not None:
            node.close()
        ray.shutdown()
        cluster.shutdown()
