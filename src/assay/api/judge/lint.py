"""Public API for `assay judge lint`: likely mistakes in the criteria of a rubric. Calls no model."""

from assay.rubrics import lint_rubric
from assay.rubrics.lint import Finding
from assay.rubrics.loading import RubricSource
from assay.runs.loading import load_judge, load_rubric
from assay.sources.trust import trusts
from assay.support.keywords import takes


@takes()
@trusts
def lint(rubric: RubricSource) -> list[Finding]:
    """Criteria that ask two questions, ask about what a judge does not see, or occur twice; see `lint_rubric`.

    Questions of judges in files of their own, which the rubric names with `use`, are read from those.

    Args:
        rubric: a YAML file, a shipped name, or a rubric.
    Raises:
        RubricError: the rubric or one of its judges cannot be loaded.
    """
    return lint_rubric(load_rubric(rubric), used=lambda name: load_judge(name, own_model=False).spec.text)
