"""Deployments in the store: started, decided, ended. Implements `Records` for `advance`.

A decision, the state of its deployment and the aliases that it moves are written in one transaction, so that a killed
process leaves all of them or none.
"""

import itertools
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from assay.deployment.decisions import PAUSED, PROMOTED, ROLLED_BACK, RUNNING, Decision, State
from assay.deployment.evidence import Arms
from assay.deployment.plan import Metric, Plan
from assay.deployment.readings import Paired
from assay.deployment.registry import (
    Registry,
    Version,
    check_not_retired_in,
    current_user,
    lock_version,
    move_alias,
    retire_in,
    retired_in,
)
from assay.deployment.rollout_values import Covariate, arms_of, pairs_of, recorded_covariate, requests_of, units_of
from assay.errors import ConfigError, DeploymentError
from assay.support.values import json_value
from assay.traces.records import new_id
from assay.traces.store import tables as schema
from assay.traces.store.leases import present, seconds, writing
from assay.traces.store.rows import as_json, clean

ENDED_STATUSES = (PROMOTED, ROLLED_BACK, "stopped")


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A staged rollout of `candidate` in place of `champion`, both version numbers of `agent`."""

    id: str
    agent: str
    champion: int
    candidate: int
    plan: Plan
    state: State
    started_at: float
    started_by: str

    @property
    def share(self) -> float:
        """Share of the units on the candidate now."""
        if self.state.status == PROMOTED:
            return 1.0
        return 0.0 if self.state.status in ENDED_STATUSES else self.plan.steps[self.state.step].share


class Deployments:
    """The deployments in a store.

    Args:
        engine: of an open `Store`.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self.engine, self.registry = engine, Registry(engine)

    def start(self, candidate: str, plan: Plan, *, checks: Mapping[str, Any] | None = None) -> Deployment:
        """Starts the rollout of a version. The agent's champion is what it is compared with.

        Args:
            candidate: `AGENT@NUMBER` or `AGENT@ALIAS`.
            checks: results of the checks before the start; kept as the first row of the history.
        Raises:
            DeploymentError: the agent has no champion, the candidate is it, or a deployment of the agent is active.
        """
        version = self.registry.version(candidate)
        champion = self.registry.alias(version.agent, "champion")
        if champion is None:
            raise DeploymentError(
                f"agent {version.agent!r} has no champion to compare with: name one, as in assay registry alias "
                f"{version.agent}@1 champion"
            )
        if champion == version.number:
            raise DeploymentError(f"{version.name} is already the champion")
        for number in (champion, version.number):
            self.registry.folder_of(self.registry.version(f"{version.agent}@{number}"))
        now, user = present(self.engine), current_user()
        row = {
            "id": new_id(), "agent": version.agent, "champion": champion, "candidate": version.number,
            "plan_json": as_json(plan.to_dict()), "status": RUNNING, "stage": 0, "stage_at": now, "decided": 0,
            "evaluations": 0, "active": version.agent, "started_at": now, "started_by": clean(user),
        }  # fmt: skip
        try:
            with writing(self.engine, "the deployment") as connection:
                lock_version(connection, version.agent, version.number)
                check_not_retired_in(connection, version.agent, version.number)
                connection.execute(sa.insert(schema.deployments).values(**row))
                if checks is not None:
                    connection.execute(sa.insert(schema.deployment_decisions).values(**_first(row, checks)))
                move_alias(
                    connection, version.agent, "candidate", version.number, by=user, why=f"deployment {row['id']}"
                )
        except sa.exc.IntegrityError:
            self.check_idle(version.agent)
            raise DeploymentError(f"a deployment of agent {version.agent!r} is active already") from None
        return self.get(str(row["id"]))

    def get(self, name: str) -> Deployment:
        """A deployment by its id or the first characters of it, or the newest one of an agent.

        Raises:
            DeploymentError: there is none, or several ids begin so.
        """
        table = schema.deployments
        by_agent = sa.select(table).where(table.c.agent == name).order_by(table.c.started_at.desc()).limit(1)
        by_id = sa.select(table).where(table.c.id.startswith(name, autoescape=True)).limit(2)
        with self.engine.connect() as connection:
            rows = connection.execute(by_agent).mappings().all() or (
                connection.execute(by_id).mappings().all() if name else []
            )
        if len(rows) == 1:
            return _deployment(rows[0])
        if rows:
            raise DeploymentError(f"several deployments have ids that begin with {name!r}: give more characters")
        raise DeploymentError(f"there is no deployment {name!r}, and no agent of this name has one")

    def active(self, agent: str) -> Deployment | None:
        """The deployment of an agent that runs or is paused."""
        table = schema.deployments
        with self.engine.connect() as connection:
            row = connection.execute(sa.select(table).where(table.c.active == agent)).mappings().first()
        return None if row is None else _deployment(row)

    def check_idle(self, agent: str) -> None:
        """Raises `DeploymentError` if a deployment of the agent runs or is paused."""
        if (active := self.active(agent)) is not None:
            raise DeploymentError(
                f"a deployment of agent {agent!r} is active already: {active.id}, {active.state.status}. Promote it or "
                "roll it back first"
            )

    def all(self, agent: str | None = None, *, limit: int | None = None) -> list[Deployment]:
        """Deployments, newest first."""
        table = schema.deployments
        query = sa.select(table).order_by(table.c.started_at.desc()).limit(limit)
        with self.engine.connect() as connection:
            rows = connection.execute(query if agent is None else query.where(table.c.agent == agent)).mappings().all()
        return [_deployment(row) for row in rows]

    def history(self, deployment: str) -> list[dict[str, Any]]:
        """All decisions of a deployment, oldest first, with their numbers."""
        table = schema.deployment_decisions
        query = sa.select(table).where(table.c.deployment == self.get(deployment).id).order_by(table.c.number)
        with self.engine.connect() as connection:
            rows = connection.execute(query).mappings().all()
        return [
            {**{key: value for key, value in row.items() if key != "numbers_json"}, **json.loads(row["numbers_json"])}
            for row in rows
        ]

    def order(self, deployment: str, action: str, *, reason: str = "", by: str | None = None) -> Decision:
        """What a person orders: pause, resume, promote or rollback.

        Raises:
            DeploymentError: the deployment is in a state in which this is not possible.
        """
        if action not in ("pause", "resume", "promote", "rollback"):
            raise ConfigError(f"action={action!r} must be pause, resume, promote or rollback")
        for _ in range(20):
            current = self.get(deployment)
            before = current.state
            allowed = {"pause": (RUNNING,), "resume": (PAUSED,)}.get(action, (RUNNING, PAUSED))
            undo = action == "rollback" and before.status == PROMOTED
            if before.status not in allowed and not undo:
                raise DeploymentError(f"deployment {current.id} is {before.status}: {action} is not possible")
            status = {"pause": PAUSED, "resume": RUNNING, "promote": PROMOTED, "rollback": ROLLED_BACK}[action]
            after = replace(before, status=status, version=before.version + 1)
            decision = Decision(action=action, rule="order", reason=reason or "requested by a person", step=before.step)
            if self._write(current, decision, before, after, by or current_user()):
                return decision
        raise DeploymentError(f"deployment {deployment} is being changed by other processes: try again")

    def retire(self, version: Version, *, why: str) -> str | None:
        """Retires a version permanently: it leaves all aliases but `champion`, and the active deployment of it is
        rolled back, in one transaction. No alias or deployment takes it again.

        Returns:
            The id of the deployment that was rolled back, or None.
        """
        table, user = schema.deployments, current_user()
        of_it = sa.select(table).where(table.c.active == version.agent, table.c.candidate == version.number)
        with writing(self.engine, "the deployment") as connection:
            retire_in(connection, version, why=why, by=user)
            row = connection.execute(of_it.with_for_update()).mappings().first()
            if row is None:
                return None
            active = _deployment(row)
            decision = Decision(action="rollback", rule="order", reason=f"the candidate is retired: {why}",
                                step=active.state.step)  # fmt: skip
            after = replace(active.state, status=ROLLED_BACK, version=active.state.version + 1)
            self._write_in(connection, active, decision, active.state, after, user)
            return active.id

    # -- `Records`
    def state(self, name: str) -> tuple[Plan, State]:
        deployment = self.get(name)
        return deployment.plan, deployment.state

    def evidence(self, name: str, metric: Metric, now: float) -> Arms:
        deployment = self.get(name)
        covariate = Covariate()
        if deployment.plan.covariate:
            covariate = recorded_covariate(
                self.engine, deployment.id, metric, champion=f"{deployment.agent}@{deployment.champion}",
                before=deployment.started_at, fixed=not deployment.plan.steps[deployment.state.step].shadow,
            )  # fmt: skip
        return arms_of(self.engine, deployment.id, metric, now, covariate.of)

    def shadow(self, name: str, metric: Metric) -> Paired:
        return pairs_of(self.engine, self.get(name).id, metric)

    def units(self, name: str, step: int) -> Mapping[str, int]:
        deployment = self.get(name)
        return units_of(self.engine, deployment.id, step, deployment.plan.steps[step].share)

    def requests(self, name: str, step: int, now: float) -> Mapping[str, int]:
        return requests_of(self.engine, self.get(name).id, step)

    def write(self, name: str, decision: Decision, before: State, after: State) -> bool:
        return self._write(self.get(name), decision, before, after, "assay")

    def _write(self, deployment: Deployment, decision: Decision, before: State, after: State, by: str) -> bool:
        with writing(self.engine, "the deployment") as connection:
            return self._write_in(connection, deployment, decision, before, after, by)

    def _write_in(
        self, connection: sa.Connection, deployment: Deployment, decision: Decision, before: State, after: State,
        by: str,
    ) -> bool:  # fmt: skip
        """Writes a decision in the transaction of `connection`; False if the state is no longer `before`.

        Raises:
            DeploymentError: the version that would become the champion is retired.
        """
        table, now = schema.deployments, seconds(connection)
        changed = (
            sa.update(table)
            .where(table.c.id == deployment.id, table.c.decided == before.version, table.c.status == before.status)
            .values(
                status=after.status, stage=after.step, stage_at=after.started_at, decided=after.version,
                evaluations=after.evaluations, active=None if after.status in ENDED_STATUSES else deployment.agent,
            )
        )  # fmt: skip
        numbers: dict[str, Any] = {"readings": json_value(decision.readings), "requests": dict(decision.requests)}
        if decision.watch is not None:
            numbers["watch"] = decision.watch
        if decision.replay is not None:
            numbers["replay"] = dict(decision.replay)
        row = {
            "deployment": deployment.id, "number": after.version, "stage": decision.step, "action": decision.action,
            "rule": decision.rule, "reason": clean(decision.reason), "numbers_json": as_json(numbers), "at": now,
            "by": clean(by)[:200],
        }  # fmt: skip
        moves = _moves(deployment, before, after)
        if moves:
            lock_version(connection, deployment.agent, moves["champion"])
        if not connection.execute(changed).rowcount:
            return False
        connection.execute(sa.insert(schema.deployment_decisions).values(**row))
        if moves:
            check_not_retired_in(connection, deployment.agent, moves["champion"])
            retired = retired_in(connection, deployment.agent)
            for alias, number in moves.items():
                why = f"deployment {deployment.id}: {decision.reason}"
                move_alias(connection, deployment.agent, alias, 0 if number in retired else number, by=by, why=why)
        return True


def _moves(deployment: Deployment, before: State, after: State) -> dict[str, int]:
    """Versions by the aliases that a change moves, the champion first.

    Promotion makes the candidate the champion and keeps the old one as `previous`; a rollback of a promotion takes both
    back.
    """
    if after.status == PROMOTED:
        return {"champion": deployment.candidate, "previous": deployment.champion}
    if after.status == ROLLED_BACK and before.status == PROMOTED:
        return {"champion": deployment.champion, "previous": deployment.candidate}
    return {}


def _first(row: Mapping[str, Any], checks: Mapping[str, Any]) -> dict[str, Any]:
    """The row of the history that has the checks before the start."""
    suite = checks.get("suite")
    tasks = f"{suite['pass_rate']:.1%} of {suite['n']} tasks of the suite passed" if suite else "no validation suite"
    broken = [*checks.get("breaks", ()), *(suite["missed"] if suite else ())]
    return {
        "deployment": row["id"], "number": 0, "stage": 0, "action": "start", "rule": "checks",
        "reason": clean(f"{tasks}; forced: {'; '.join(broken)}" if broken else tasks), "at": row["started_at"],
        "numbers_json": as_json(dict(checks)), "by": row["started_by"],
    }  # fmt: skip


def _deployment(row: Any) -> Deployment:
    state = State(
        step=row["stage"], status=row["status"], started_at=row["stage_at"], version=row["decided"],
        evaluations=row["evaluations"],
    )  # fmt: skip
    return Deployment(
        id=row["id"], agent=row["agent"], champion=row["champion"], candidate=row["candidate"],
        plan=Plan(**json.loads(row["plan_json"])), state=state, started_at=row["started_at"],
        started_by=row["started_by"],
    )  # fmt: skip


# -- What happens to versions that hold the data of an erased person: they are named, or retired. Deletes no file.


POLICIES = ("name", "retire")


def versions_of_erased(
    deployments: Deployments,
    person: Collection[str],
    folders: Collection[str],
    adapters: Collection[str],
    *,
    policy: str,
) -> list[dict[str, Any]]:
    """Names the registered versions, of all agents, that hold a person's data, or retires them.

    A retired version leaves all aliases but `champion`; a deployment of it that runs is rolled back. The champion stays
    in production, because an agent without one answers nobody: a person must deploy another version.

    Args:
        person: hashes of the data subject, see `subject_digests`.
        folders: artifacts that were made from the person's data.
        adapters: hashes of adapters that were trained on it.
    Returns:
        For each version: `version`, `artifact`, `retired`, `aliases` that named it, `is_champion`, and the id of the
        `deployment` that was rolled back, or None.
    """
    rows, registry = [], deployments.registry
    for version in itertools.chain.from_iterable(map(registry.versions, registry.agents())):
        if (
            set(version.people).isdisjoint(person)
            and version.artifact not in folders
            and set(version.adapters).isdisjoint(adapters)
        ):
            continue
        aliases = [alias for alias, number in registry.aliases(version.agent).items() if number == version.number]
        rolled_back = None
        if policy == "retire":
            rolled_back = deployments.retire(version, why="it holds data of an erased person")
        rows.append(
            {
                "version": version.name, "artifact": version.artifact, "retired": policy == "retire",
                "aliases": aliases, "is_champion": "champion" in aliases, "deployment": rolled_back,
            }
        )  # fmt: skip
    return rows
