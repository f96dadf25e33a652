"""The model that will be trained on an export: its chat template, and what that template makes of the rows. Writes no files."""

from collections.abc import Mapping
from typing import Any

from assay.models.chattemplates import TemplateRefused, find_template, hub_name
from assay.traces.export_config import ExportConfig
from assay.traces.formats import trained_parts
from assay.traces.rendering import RowRenderer, shows_tools, training_template
from assay.traces.selection import Turn

__all__ = ["TEMPLATE", "Target"]

TEMPLATE = "template"  # the problem of a call whose answer the template cannot show


class Target:
    """The chat template of the model in an export's settings, with counts of what it was used on.

    Raises:
        ModelError: the settings name an embedded model that does not exist.
    """

    def __init__(self, config: ExportConfig) -> None:
        self.name, self.demos = config.model, config.demos
        self.renders = config.kind != "transitions"  # their rows are tokens
        self.checks = config.kind in ("sft", "preferences")  # the calls themselves; of grpo only prompts are written
        self.template = find_template(config.model) if self.renders else None
        # trl's GRPO trainer renders no tools of a row, whatever the template can show
        self.renderer = RowRenderer(self.template, "text" if (config.kind, config.tools) == ("grpo", "auto") else config.tools)
        marked = self.template is not None and config.whole and not shows_tools(self.template)
        self.marked = training_template(self.template) if self.template is not None and marked else None

    def problem(self, turn: Turn) -> str | None:
        """`TEMPLATE` where a model could not be trained on this call's answer, else None."""
        return TEMPLATE if self.checks and self.renderer.check(*trained_parts(turn, demos=self.demos)) is not None else None

    def see_whole(self, row: Mapping[str, Any]) -> None:
        """Gives up the marked template where it renders a conversation in another way than the model's own."""
        if self.marked is None or self.template is None:
            return
        try:
            if self.marked.render(row["messages"]) != self.template.render(row["messages"]):
                self.marked = None
        except TemplateRefused:
            self.marked = None

    def to_dict(self) -> dict[str, Any]:
        """For the manifest: the model, whether and where its template was found, and what became of the calls."""
        found = self.template is not None
        told = {"model": self.name, "trained_as": hub_name(self.name), "found": found, "source": self.template.source if self.template else None}
        note = f"the chat template of {self.name} is not on this machine: whether it shows the answers was not checked"
        return {**told, **self.renderer.to_dict(), **({} if found else {"calls": 0, "note": note})}
