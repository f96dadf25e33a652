"""`assay improve`: prompt compilation and weight training in turn. The steps are in `assay.commands.improving`."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from assay.commands.groups import JobOutput, Planned, Trusting
from assay.commands.improve_settings import ImproveReport, ImproveSettings
from assay.support.options import function_of

if TYPE_CHECKING:
    from typing import Self

    from assay.runs.jobs import Job
    from assay.runs.planning import Request


class ImproveOutput(Planned, JobOutput):
    """Output."""


class Improve(Trusting, ImproveSettings):
    """Improve PROGRAM: prompts, then weights, then prompts again.

    Each step is kept only if it passes the gate; the sealed test is reported at the end. A part of the caps is kept for
    the gate of each step that fits them and for the sealed test; the steps share the rest. A step starts only if its
    work, its gate and the sealed test fit. A reached cap ends the command with the best version so far; with a higher
    cap `resume` continues. When new data arrives, run it again on the artifact with another name.

    Raises:
        ConfigError: an unknown step, an adapter of this name, or nothing to resume.
        AssayError: what was wrong, which rule, what to do.
    """

    OUTPUT: ClassVar[Any] = ImproveOutput

    def prepared(self) -> "Self":
        from assay.commands.improving import with_names

        return with_names(self)

    def request(self, job: "Job", each: float) -> "Request":
        from assay.commands.improving import check_name, steps_of
        from assay.optimizers.budget import too_small
        from assay.runs.planning import Request

        if not self.resume:
            check_name(self)
        plan, caps = steps_of(self, job), replace(self.caps, search_calls=None)
        small = too_small(job.splits.sizes())
        notes = [*([] if small is None else [f"warning: {small}"]), *plan.lines(caps)]
        return Request(runs=plan.runs, notes=notes, steps=plan.rows(caps))

    def run(self) -> ImproveReport:
        from assay.commands.improving import improved

        return improved(self)


improve = function_of(Improve, "improve")
