"""The shipped program `converse`: a conversation of many turns with a user, at whose end a form is filled.

One predictor reads what a message says, another one chooses what to ask and words the reply: a small model can do each
of these. The earlier turns are a `dspy.History`. `ConversationGuide` says what `converse` should have done by the
labels of a task, as demonstrations: only the search for demonstrations uses it, for training tasks. It calls no model.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Unpack

import dspy
from dspy.utils.exceptions import AdapterParseError

from assay.errors import DataError, ProgramError
from assay.models.calls import stop_in
from assay.models.limits import current_tool_limit, limited, within_limit
from assay.programs.agent import GUIDE, Agent, AgentSettings, Held, calls_so_far
from assay.programs.memory import Memory
from assay.programs.parameters import AgentParameters
from assay.programs.simulated_users import (
    ENDINGS,
    MESSAGE_CHARS,
    RuleBasedUser,
    SimulatedUser,
    UserProfile,
    UserProgram,
    plain_value,
    user_failure,
)
from assay.programs.thinking import with_thought
from assay.support.names import one_of
from assay.support.scrubbing import error_text
from assay.traces.places import current_rollout
from assay.traces.recorder import aside
from assay.traces.records import Rollout
from assay.traces.store.rows import clean


@dataclass(frozen=True)
class ConversationGuide:
    """The right decisions in a conversation whose outcome and user are known.

    Attributes:
        expected: field -> value.
        facts: of the user's profile.
    """

    expected: Mapping[str, str]
    facts: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, expected: Mapping[str, Any], profile: Any) -> "ConversationGuide | None":
        """None if the task has no expected outcome."""
        outcome = expected.get("outcome")
        if not isinstance(outcome, Mapping):
            return None
        return cls({str(name): str(value) for name, value in outcome.items()}, UserProfile.of(profile).facts)

    def noted(self, asked: str, message: str) -> tuple[str, str] | None:
        """Field and value of a message; None if the labels do not tell.

        The longest statement counts: a correction can contain the short one that it corrects.
        """
        text = plain_value(message).casefold()
        matches = [
            (len(words), name == asked, (name, value) if value else ("none", "none"))
            for name in self.facts
            for words, value in self._statements(name)
            if words in text
        ]
        return max(matches, key=lambda entry: entry[:2])[2] if matches else None

    def _statements(self, name: str) -> Iterator[tuple[str, str]]:
        """What the user can say about a fact, and the value to note, "" for none."""
        fact = self.facts[name]
        value = self.expected.get(name, str(fact["value"]))
        first = fact.get("first")
        for words, meant in (
            (fact.get("delays"), ""),
            (first["says"] if isinstance(first, Mapping) else None, str(first["value"]) if first else ""),
            (fact.get("corrects"), value),
            (fact["says"], value),
        ):
            if words is not None:
                yield plain_value(words).casefold(), meant

    def chosen(self, missing: Sequence[str], asked: str) -> str:
        """The next field to ask for: not the one that was just asked for, if there is another one."""
        return next((name for name in missing if name != asked), missing[0])

    def asked(self, description: str) -> str:
        """A question for a field."""
        return f"What is the {description}?"


USERS = ("rules", "model")
_FINISH, _GO_ON, _NONE = "finish", "go_on", "none"
_REPLY, _QUESTION, _VALUE = 300, 120, 80  # characters
_RECALLED = 5  # facts among which the value of a field is found
_TURNS = 20  # the default of max_steps


@dataclass
class _Talk:
    """One conversation as the agent sees it."""

    service: str
    form: dict[str, str]
    outcome: dict[str, str] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    asked: str = ""
    person: str = ""
    personal: tuple[str, ...] = ()  # fields that are remembered
    guide: ConversationGuide | None = None

    @property
    def missing(self) -> list[str]:
        return [name for name in self.form if name not in self.outcome]


class Converse(Agent):
    """Talks with a user, one reply a turn, and fills a form with what the user says.

    Inputs are `service` (what the agent is for), `user` (`goal` and `facts` of the simulated user, which no prompt
    of the agent has), and optionally `form` (names of the fields, or name -> description). Outputs are `outcome`
    (field -> value), `messages` (each with `role` and `content`) and `ended`: `done` or `gave_up` by the user, `limit`
    after `max_steps` replies. `turn_calls` has for each reply the range of its LM calls in the rollout. The first
    message opens the conversation and fills no field; each later one fills at most one.

    With the inputs `message`, `history` and `outcome` instead of `user` it makes one turn of a conversation with a real
    user, and returns `reply`, `history`, `outcome` and `finished`.

    `max_steps` is 20 by default. Older turns are dropped from prompts above `context_length`. A reply has a thought
    before it from `reasoning_depth` 4 on and is reviewed from 6 on. `tool_usage_threshold` has no effect.

    Args:
        user: `rules` (`RuleBasedUser`), `model` (`SimulatedUser`), or a program of your own (`UserProgram`); for
            artifacts write a subclass in a file whose `__init__` passes it.
        user_model: model of `user='model'`; by default that of the agent.
        memory: a `Memory`, or its name in the store. With the inputs `person` and `personal` (fields of the form that
            stay true of the person) it keeps the values of these fields for later conversations, and fills them in.
    Raises:
        ProgramError: there is no such user, or `user_model` would have no effect.
    """

    input_names: ClassVar = ("service", "user")
    guided: ClassVar = True

    def __init__(
        self,
        user: Any = "rules",
        *,
        user_model: str | None = None,
        memory: Memory | str | None = None,
        **agent: Unpack[AgentSettings],
    ) -> None:
        agent["parameters"] = agent.get("parameters") or AgentParameters(max_steps=_TURNS)
        super().__init__(**agent)
        if user_model is not None and user != "model":
            raise ProgramError(f"user_model={user_model!r} applies to user='model' only, got user={user!r}")
        self.config = {name: value for name, value in (("user", user), ("user_model", user_model)) if value is not None}
        if not isinstance(user, str):
            self.config = {"user": f"<{type(user).__name__}>"} if type(self) is Converse else {}
        self._memory = Memory(name=memory) if isinstance(memory, str) else memory
        if self._memory is not None:
            self.config["memory"] = self._memory.name
        self._user = Held(_user(user, user_model, self.prompt_format))
        self._add_predictors()

    def _add_predictors(self) -> None:
        message = {"message": (str, dspy.InputField(desc="what the user says"))}
        history = {"history": (dspy.History, dspy.InputField())}
        self.note = dspy.Predict(
            dspy.Signature(
                {
                    "asked": (str, dspy.InputField(desc="the field that was asked for")),
                    **message,
                    "field": (str, dspy.OutputField(desc="the field whose value the message has, or none")),
                    "value": (str, dspy.OutputField(desc="the value as the user says it", max_length=_VALUE)),
                },
                "Find the field of the form that the message has a value for, and copy the value from the message.",
            )
        )
        missing = {"missing": (str, dspy.InputField(desc="fields of the form that are not known yet"))}
        about = {"about": (str, dspy.OutputField(desc="the field to ask for, or finish if nothing is missing"))}
        self.choose = dspy.Predict(
            dspy.Signature(
                {**missing, **message, **history, **about},
                "Choose the field to ask for next. Finish only when nothing is missing.",
            )
        )
        service = {"service": (str, dspy.InputField(desc="what you are for"))}
        topic = {"field": (str, dspy.InputField(desc="what to ask for"))}
        question = {"question": (str, dspy.OutputField(max_length=_QUESTION))}
        self.ask = dspy.Predict(
            dspy.Signature(
                {**service, **message, **history, **topic, **question},
                "Ask the customer a short question about the field.",
            )
        )
        reply = {"reply": (str, dspy.OutputField(desc="what you say to the user", max_length=_REPLY))}
        self.say = dspy.Predict(
            dspy.Signature({**service, **message, **history, **reply}, "Reply to the user, and help with the request.")
        )
        draft = {"draft": (str, dspy.InputField(desc="a first reply"))}
        self.review = dspy.Predict(
            dspy.Signature({**service, **message, **history, **draft, **reply}, "Correct the draft of the reply.")
        )

    def solve(self, **inputs: Any) -> dspy.Prediction:
        talk = _Talk(str(inputs.get("service", "")), _form_of(inputs.get("form")))
        if self._memory is not None and inputs.get("person"):
            talk.person = str(inputs["person"])
            talk.personal = tuple(name for name in inputs.get("personal") or () if name in talk.form)
        if "message" in inputs:
            return self._one_turn(talk, inputs)
        expected = dspy.settings.get(GUIDE)
        talk.guide = None if not (expected and talk.form) else ConversationGuide.of(expected, inputs.get("user"))
        if talk.guide is not None:  # what labels say is not remembered
            talk.personal = ()
        self._recall(talk)
        messages: list[dict[str, str]] = []
        turn_calls: list[list[int] | None] = []
        limit = self.agent_parameters.max_steps
        for at in range(limit + 1):
            turn = self._user_turn(inputs.get("user"), messages)
            messages.append({"role": "user", "content": turn.message})
            if turn.ended or at == limit:
                break
            start = calls_so_far()
            reply = self._reply(talk, turn.message)
            messages.append({"role": "agent", "content": reply})
            end = calls_so_far()
            turn_calls.append(None if start is None or end is None else [start, end])
        ended = turn.ended or "limit"
        return dspy.Prediction(outcome=dict(talk.outcome), messages=messages, ended=ended, turn_calls=turn_calls)

    def _one_turn(self, talk: _Talk, inputs: Mapping[str, Any]) -> dspy.Prediction:
        """A turn with a real user."""
        earlier = inputs.get("history") or []
        talk.history = [dict(entry) for entry in (getattr(earlier, "messages", None) or earlier or [])]
        talk.outcome = dict(inputs.get("outcome") or {})
        talk.asked = str(talk.history[-1].get("about", "")) if talk.history else ""
        if not talk.history:
            self._recall(talk)
        reply = self._reply(talk, str(inputs["message"]))
        return dspy.Prediction(reply=reply, history=talk.history, outcome=talk.outcome, finished=talk.asked == _FINISH)

    def _user_turn(self, profile: Any, messages: Sequence[Mapping[str, str]]) -> Any:
        """The user's next message.

        Raises:
            EnvironmentFailed: the user raised, took too long, or returned something else.
        """
        user, rollout = self._user.value, current_rollout()
        own = Rollout(
            task_id=rollout.task_id if rollout else "",
            task_type=rollout.task_type if rollout else "default",
            group_id=rollout.group_id if rollout else "",
            source="simulated_user",
            program=type(user).__name__,
            split=rollout.split if rollout else "",
            inputs={"messages": copy.deepcopy(list(messages))},
            tenant=rollout.tenant if rollout else None,
            data_subject=rollout.data_subject if rollout else None,
            consent=rollout.consent if rollout else None,
        )
        try:
            with dspy.context(trace=[]):
                if isinstance(user, RuleBasedUser):
                    turn = user(profile=profile, messages=messages)
                else:
                    with aside(own), limited(current_tool_limit()):
                        earlier = copy.deepcopy(list(messages))
                        turn = within_limit(lambda: user(profile=profile, messages=earlier), "its turn")
            message, ended = turn.message, str(turn.ended or "")
        except DataError:
            raise
        except (Exception, SystemExit) as error:
            if (stop := stop_in(error)) is not None:
                raise stop from error
            raise user_failure(user, f"failed: {error_text(error)}") from error
        if not isinstance(message, str):
            raise user_failure(user, f"returned message={message!r}; it must be text")
        if ended not in ENDINGS:
            raise user_failure(user, f"returned ended={ended!r}; it must be one of {', '.join(map(repr, ENDINGS))}")
        return dspy.Prediction(message=clean(message[:MESSAGE_CHARS]), ended=ended)

    def _reply(self, talk: _Talk, message: str) -> str:
        """Reads the message, chooses what to ask, and words the reply. Updates the talk."""
        if talk.form and talk.history:
            self._note(talk, message)
        talk.asked = self._chosen(talk, message)
        reply = self._worded(talk, message)
        talk.history.append({"message": message, "about": talk.asked, "reply": reply})
        return reply

    def _recall(self, talk: _Talk) -> None:
        """Fills the personal fields with what earlier conversations with the person said."""
        for name in talk.personal if self._memory is not None else ():
            assert self._memory is not None
            known = self._memory.recall(f"{name} {talk.form[name]}", subject=talk.person, k=_RECALLED)
            value = next((fact.text.partition(": ")[2] for fact in known if fact.about == name), "")
            if value:
                talk.outcome[name] = value

    def _note(self, talk: _Talk, message: str) -> None:
        """Adds to the outcome what the message says. A value that is not in the message is not taken."""
        names = Literal[(*talk.form, _NONE)]  # type: ignore[valid-type]
        inputs = {"asked": talk.asked if talk.asked in talk.form else _NONE, "message": message}
        if talk.guide is not None:
            if (label := talk.guide.noted(inputs["asked"], message)) is None:
                return
            noted = dspy.Prediction(field=label[0], value=label[1])
            self._show(self.note, inputs, noted)
        else:
            try:
                noted = self.note(signature=self.note.signature.with_updated_fields("field", type_=names), **inputs)
            except AdapterParseError:  # nothing was understood: the field is asked for again
                return
        value = plain_value(noted.value)
        if noted.field in talk.form and value and value.casefold() in plain_value(message).casefold():
            talk.outcome[noted.field] = value
            if self._memory is not None and noted.field in talk.personal:
                self._memory.remember(talk.person, f"{talk.form[noted.field]}: {value}", about=noted.field)
        else:
            noted._store.update(field=_NONE, value=_NONE)  # the trace has what was used

    def _chosen(self, talk: _Talk, message: str) -> str:
        """What the reply is about: a missing field, or the end."""
        choices = (*talk.missing, _FINISH) if talk.form else (_GO_ON, _FINISH)
        if len(choices) == 1:
            return _FINISH
        inputs = {"missing": ", ".join(talk.missing), "message": message}
        if talk.guide is not None:
            about = talk.guide.chosen(talk.missing, talk.asked)
            self._show(self.choose, inputs, dspy.Prediction(about=about))
            return about
        signature = self.choose.signature.with_updated_fields("about", type_=Literal[choices])
        signature = with_thought(signature, self.deep_thought_tokens)
        earlier = [{"message": turn["message"], "about": turn["about"]} for turn in talk.history]
        return str(self._asked(self.choose, inputs, earlier, signature).about)

    def _worded(self, talk: _Talk, message: str) -> str:
        """The text of the reply. The end of a conversation with a form states the form, and calls no model."""
        if talk.form and talk.asked == _FINISH:
            values = ", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in talk.outcome.items())
            return f"Thank you. Confirmed. {values}." if values else "Thank you, goodbye."
        inputs = {"service": talk.service, "message": message}
        if talk.form:
            inputs["field"] = talk.form[talk.asked]
            if talk.guide is not None:
                question = talk.guide.asked(inputs["field"])
                self._show(self.ask, inputs, dspy.Prediction(question=question))
                return question
        predictor, output = (self.ask, "question") if talk.form else (self.say, "reply")
        earlier = [
            {"service": talk.service, "message": turn["message"], "field": talk.form.get(turn["about"]),
             output: turn["reply"]}
            for turn in talk.history
        ]  # fmt: skip

        def review(draft: str) -> str:
            return str(self._asked(self.review, {**inputs, "draft": draft}, earlier).reply).strip()

        return self.reviewed(str(self._asked(predictor, inputs, earlier)[output]).strip(), review)

    def _show(self, predictor: dspy.Predict, inputs: dict[str, Any], output: dspy.Prediction) -> None:
        """Adds a step of the guide to the trace, as if the predictor had made it."""
        if dspy.settings.trace is not None:
            dspy.settings.trace.append((predictor, inputs, output))

    def _asked(
        self, predictor: dspy.Predict, inputs: dict[str, Any], earlier: list[dict[str, Any]], signature: Any = None
    ) -> Any:
        """Calls a predictor with as many earlier turns as fit. The trace has none: a demonstration is one turn."""
        signature = signature or predictor.signature

        def history(turns: list[dict[str, Any]]) -> dspy.History:
            return dspy.History(messages=turns)

        filled = self.fit_context(predictor, signature, inputs, earlier, "history", joined=history)
        with dspy.context(trace=[]):
            result = predictor(signature=signature, **filled)
        if dspy.settings.trace is not None:
            dspy.settings.trace.append((predictor, inputs, result))
        return result


def _user(user: Any, model: str | None, prompt_format: str) -> UserProgram:
    if user == "rules":
        return RuleBasedUser()
    if user == "model":
        return SimulatedUser(model, prompt_format=prompt_format)
    if isinstance(user, str):
        rule = one_of(user, USERS, other="a program")
        own = ". An artifact cannot contain a user object: write a subclass of Converse in a file, whose __init__ "
        own += "passes it, and use file.py:NAME"
        raise ProgramError(f"user={user!r} {rule}{'' if rule.endswith('?') else own}")
    if isinstance(user, type) or not callable(user):
        raise ProgramError(f"user={user!r} must be callable as user(profile=…, messages=…)")
    return user


def _form_of(form: Any) -> dict[str, str]:
    """Field -> description.

    Raises:
        DataError: another form, or a field named like a choice of the agent.
    """
    if form is None or form == "":
        return {}
    if isinstance(form, Mapping):
        fields = {str(name): str(text or name) for name, text in form.items()}
    elif isinstance(form, list | tuple):
        fields = {str(name): str(name).replace("_", " ") for name in form}
    else:
        raise DataError(f"form={form!r} must be a list of fields, or a mapping of fields to descriptions")
    if clash := sorted({_FINISH, _GO_ON, _NONE} & fields.keys()):
        raise DataError(f"form has a field named {clash[0]!r}, which the agent uses itself: rename it")
    return fields
