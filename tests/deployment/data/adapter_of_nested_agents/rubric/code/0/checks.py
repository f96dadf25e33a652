from assay.rubrics import Grade


def short(task, prediction, rollout, most=20):
    return Grade(value=float(len(str(prediction["capital"])) <= most))
