from assay.judges.pointwise import PointwiseJudge
from assay.judges.agreement import agreement  # noqa
from assay.judges.ranking import win_rates  # noqa


class Kind(PointwiseJudge):
    def __init__(self, **options):
        super().__init__({"text": "Is the text kind?", "scale": ["no", "yes"]}, **{k: v for k, v in options.items() if k != "spec"})

    def read(self, given):
        return super().read(given)
