from assay import recording
from assay.optimizers import AgentMetrics
from assay.rubrics import Grade
from assay.rubrics.yamlfiles import MOST_BYTES


def short(task, prediction, rollout, most=20):
    assert callable(recording.record) and AgentMetrics.__name__ == "AgentMetrics"
    return Grade(value=float(len(str(prediction["capital"])) <= min(most, MOST_BYTES)))
