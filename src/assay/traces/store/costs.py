"""What calls cost, in queries. Cached answers cost nothing, and a failed call has no price."""

import sqlalchemy as sa

from assay.traces.store.tables import transitions

_columns = transitions.c
PAID = sa.case((_columns.cached, 0.0), else_=sa.func.coalesce(_columns.cost_usd, 0.0))  # dollars
# 1 where the price is not known
UNPRICED = sa.case((sa.or_(_columns.cached, _columns.cost_usd.is_not(None), _columns.error.is_not(None)), 0), else_=1)
