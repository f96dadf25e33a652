"""CrewAI: a crew of one agent with a tool and a task, unstreamed and streamed."""

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from driver import INSTRUCTIONS, calculator, run

TOOL = tool("calculator")(calculator)


def agent(streamed: bool, question: str) -> str:
    llm = LLM(model="openai/gpt-4o", stream=streamed)
    worker = Agent(role="calculator", goal=INSTRUCTIONS, backstory="You know numbers.", tools=[TOOL], llm=llm)
    return (
        Crew(agents=[worker], tasks=[Task(description=question, expected_output="A number.", agent=worker)])
        .kickoff()
        .raw
    )


run(sync=lambda question: agent(False, question), stream=lambda question: agent(True, question))
