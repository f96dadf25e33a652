"""Adds versions of agents, aliases, flags, deployments and their decisions; and what production says of a rollout."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("rollouts", sa.Column("deployment", sa.String(32)))
    op.add_column("rollouts", sa.Column("stage", sa.Integer))
    op.add_column("rollouts", sa.Column("arm", sa.String(16)))
    op.add_column("rollouts", sa.Column("propensity", sa.Float))
    op.add_column("rollouts", sa.Column("unit", sa.String(32)))
    op.add_column("rollouts", sa.Column("version", sa.String(100)))
    op.create_index("rollouts_by_deployment", "rollouts", ["deployment", "stage", "arm", "unit"])
    _create_versions()
    _create_deployments()


def _create_versions() -> None:
    op.create_table(
        "agent_versions",
        sa.Column("agent", sa.String(64), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("artifact", sa.Text, nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("adapters_json", sa.Text, nullable=False),
        sa.Column("parent", sa.Integer),
        sa.Column("evidence_json", sa.Text, nullable=False),
        sa.Column("people_json", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text),
        sa.Column("registered_at", sa.Float, nullable=False),
        sa.Column("registered_by", sa.String(200), nullable=False),
    )

    op.create_table(
        "agent_aliases",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("agent", sa.String(64), nullable=False),
        sa.Column("alias", sa.String(64), nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("by", sa.String(200), nullable=False),
        sa.Column("why", sa.Text, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("agent_aliases_newest", "agent_aliases", ["agent", "alias", "id"])
    op.create_table(
        "agent_flags",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("agent", sa.String(64), nullable=False),
        sa.Column("name", sa.String(300), nullable=False),
        sa.Column("value", sa.Text),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("by", sa.String(200), nullable=False),
        sa.Column("why", sa.Text, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("agent_flags_newest", "agent_flags", ["agent", "name", "id"])


def _create_deployments() -> None:
    op.create_table(
        "deployments",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("agent", sa.String(64), nullable=False),
        sa.Column("champion", sa.Integer, nullable=False),
        sa.Column("candidate", sa.Integer, nullable=False),
        sa.Column("plan_json", sa.Text, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("stage", sa.Integer, nullable=False),
        sa.Column("stage_at", sa.Float, nullable=False),
        sa.Column("decided", sa.Integer, nullable=False),
        sa.Column("evaluations", sa.Integer, nullable=False),
        sa.Column("active", sa.String(64)),
        sa.Column("started_at", sa.Float, nullable=False),
        sa.Column("started_by", sa.String(200), nullable=False),
    )
    op.create_index("deployments_of_agent", "deployments", ["agent", "started_at"])
    op.create_index("deployments_active", "deployments", ["active"], unique=True)
    op.create_table(
        "deployment_decisions",
        sa.Column("deployment", sa.String(32), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("stage", sa.Integer, nullable=False),
        sa.Column("action", sa.String(16), nullable=False),
        sa.Column("rule", sa.String(32), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("numbers_json", sa.Text, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("by", sa.String(200), nullable=False),
    )
