"""Who is where: the ranks, tasks, hosts and addresses of a log as nodes of the attempt.

Slurm's own lines on where a task ran count before the layout's arithmetic. A name that the attempt
is known not to have is nobody's: a log is a text that its user can write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurm_hooks.joblog.layout import Layout, LayoutError, expand
from slurm_hooks.joblog.lines import Line
from slurm_hooks.joblog.scan import Event


class Places:
    """Who is where in one attempt, by its layout and by what ``events`` tell.

    ``addresses`` are hosts by IP address. ``failing`` are the hosts, in order, whose tasks Slurm
    says have failed by themselves.
    """

    def __init__(
        self, events: Sequence[Event], layout: Layout, addresses: Mapping[str, str]
    ) -> None:
        self.layout = layout
        self._addresses = addresses
        self._tasks: dict[int, str] = {}
        self.failing: list[str] = []
        for event in events:
            host, tasks = event.captures.get("host"), event.captures.get("tasks")
            if not host or not tasks:
                continue
            for task in _numbers(tasks):
                self._tasks.setdefault(task, host)
            if event.signature.id != "slurm.task_signalled" and host not in self.failing:
                self.failing.append(host)
        self._highest = max((e.line.task for e in events if e.line.task is not None), default=0)

    def node(self, host: str) -> str | None:
        """The node called ``host``; None where the attempt is known not to have it."""
        known = self._addresses.get(host, host)
        if not self.layout.nodes:
            return known
        named = self.layout.node_named(known)
        return named or (known if _is_address(known) else None)

    def of_rank(self, rank: int) -> str | None:
        """The node of a global rank, as Slurm or the layout says."""
        if self._tasks and self.layout.per_node and len(self._tasks) > len(self.layout.nodes):
            return self.node(self._tasks[rank]) if rank in self._tasks else self._by_layout(rank)
        return self._by_layout(rank)

    def of_line(self, line: Line) -> str | None:
        """The node that wrote ``line``."""
        if line.host:
            named = self.node(line.host)
            if named:
                return named
        if line.rank is not None:
            return self.of_rank(line.rank)
        if line.task is not None:
            return self._of_task(line.task)
        return self.layout.nodes[0] if len(self.layout.nodes) == 1 else None

    def rank_of(self, line: Line) -> int | None:
        """The global rank that wrote ``line``, where it says so."""
        if line.rank is not None:
            return line.rank
        return line.task if line.task is not None and not self._task_is_node() else None

    def _task_is_node(self) -> bool:
        """Whether one task for each node, a launcher of several ranks, is a possible reading."""
        per_node = self.layout.per_node or 1
        return per_node > 1 and self._highest < len(self.layout.nodes)

    def _of_task(self, task: int) -> str | None:
        if task in self._tasks:
            return self.node(self._tasks[task])
        return None if self._task_is_node() else self._by_layout(task)

    def _by_layout(self, rank: int) -> str | None:
        return self.layout.node_of_rank(rank)


def _numbers(text: str) -> list[int]:
    try:
        return [int(name) for name in expand(f"[{text}]")]
    except LayoutError:
        return []


def _is_address(text: str) -> bool:
    return ":" in text or all(part.isdigit() for part in text.split("."))
