"""The model to be trained on an export: its chat template and how it renders the rows. Writes no files."""

from collections.abc import Mapping
from typing import Any

from assay.models.chat_templates import TemplateRefused, find_template, hub_name
from assay.traces.export.formats import trained_parts
from assay.traces.export.rendering import RowRenderer, marked_by_trl, shows_tools, training_template
from assay.traces.export.settings import ExportConfig
from assay.traces.export.turns import Turn

__all__ = ["TEMPLATE", "Target"]

TEMPLATE = "template"  # problem of a call whose answer the template does not render


class Target:
    """Chat template of the model in an export's settings, with counts of the checked calls.

    Raises:
        ModelError: The embedded model does not exist.
    """

    def __init__(self, config: ExportConfig) -> None:
        self.name, self.demos, self.whole = config.model, config.demos, config.whole
        self.renders = config.kind != "transitions"  # transitions are trained on their token ids
        self.checks = config.kind in ("sft", "preferences")  # grpo writes prompts only
        self.template = find_template(config.model) if self.renders else None
        # TRL's GRPO trainer never renders the tools of a row
        self.renderer = RowRenderer(
            self.template, "text" if (config.kind, config.tools) == ("grpo", "auto") else config.tools
        )
        marked = self.template is not None and config.whole and not shows_tools(self.template)
        self.marked = training_template(self.template) if self.template is not None and marked else None

    def problem(self, turn: Turn) -> str | None:
        """`TEMPLATE` if a model cannot be trained on this call's answer, else None."""
        return (
            TEMPLATE
            if self.checks and self.renderer.check(*trained_parts(turn, demos=self.demos)) is not None
            else None
        )

    def see_whole(self, row: Mapping[str, Any]) -> None:
        """Discard the marked template if it renders this conversation differently from the model's template."""
        if self.marked is None or self.template is None:
            return
        try:
            if self.marked.render(row["messages"]) != self.template.render(row["messages"]):
                self.marked = None
        except TemplateRefused:
            self.marked = None

    @property
    def masks(self) -> bool | None:
        """Whether TRL can restrict the loss to the assistant's text; None if that is not needed or not known."""
        if not self.whole or self.template is None:
            return None
        return self.template.marks_generation or self.marked is not None or marked_by_trl(self.template)

    def to_dict(self) -> dict[str, Any]:
        """For the manifest: the model, whether and where its template was found, and the counts of the calls."""
        is_installed = self.template is not None
        model = {
            "model": self.name,
            "trained_as": hub_name(self.name),
            "found": is_installed,
            "source": self.template.source if self.template else None,
        }
        note = f"the chat template of {self.name} is not installed; whether it renders the answers was not checked"
        model["masks"] = self.masks
        return {**model, **self.renderer.to_dict(), **({} if is_installed else {"calls": 0, "note": note})}
