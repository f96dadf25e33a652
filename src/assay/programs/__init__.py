"""Programs: the `Agent` base class and its five parameters, tools, prompt formats and the shipped programs."""

from typing import TYPE_CHECKING

from assay.support.lazy import attach

if TYPE_CHECKING:
    from assay.programs.adapters import ADAPTERS, LeanAdapter, SchemaAdapter, make_adapter
    from assay.programs.agent import Agent, BaseAgent
    from assay.programs.allocation import ThinkingPolicy
    from assay.programs.code_repair import CodeRepair
    from assay.programs.converse import Converse
    from assay.programs.document_answers import AnswerFromDocuments
    from assay.programs.environments.agent import EnvironmentAgent
    from assay.programs.environments.base import Environment, EnvironmentStep, InvalidAction, environment_seed
    from assay.programs.environments.experiment import Experimenter
    from assay.programs.environments.gym import GymEnvironment
    from assay.programs.environments.nim import NimPlayer
    from assay.programs.loading import SHIPPED, load_program, program_fields, program_inputs
    from assay.programs.mcp_servers import McpServer
    from assay.programs.memory import Fact, Memory
    from assay.programs.parameters import RANGES, AgentParameters
    from assay.programs.refinement import Refine
    from assay.programs.retrieval import DocumentIndex, Passage, Retriever, TextRetriever
    from assay.programs.shipped import Classify, Extract, MathQA
    from assay.programs.simulated_users import RuleBasedUser, SimulatedUser, UserProgram
    from assay.programs.sql.agent import TextToSQL
    from assay.programs.sql.opening import open_database
    from assay.programs.state import program_state, program_version, restore_program
    from assay.programs.tool_agent import ToolAgent
    from assay.programs.tool_user import ToolUser
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "adapters": "ADAPTERS LeanAdapter SchemaAdapter make_adapter",
            "agent": "Agent BaseAgent",
            "allocation": "ThinkingPolicy",
            "code_repair": "CodeRepair",
            "document_answers": "AnswerFromDocuments",
            "environments.agent": "EnvironmentAgent",
            "environments.base": "Environment EnvironmentStep InvalidAction environment_seed",
            "environments.experiment": "Experimenter",
            "environments.gym": "GymEnvironment",
            "environments.nim": "NimPlayer",
            "converse": "Converse",
            "loading": "SHIPPED load_program program_fields program_inputs",
            "mcp_servers": "McpServer",
            "memory": "Fact Memory",
            "parameters": "RANGES AgentParameters",
            "refinement": "Refine",
            "retrieval": "DocumentIndex Passage Retriever TextRetriever",
            "shipped": "Classify Extract MathQA",
            "sql.agent": "TextToSQL",
            "sql.opening": "open_database",
            "simulated_users": "RuleBasedUser SimulatedUser UserProgram",
            "state": "program_state program_version restore_program",
            "tool_agent": "ToolAgent",
            "tool_user": "ToolUser",
        },
    )

__all__ = [
    "ADAPTERS",
    "RANGES",
    "SHIPPED",
    "Agent",
    "AgentParameters",
    "AnswerFromDocuments",
    "BaseAgent",
    "Classify",
    "CodeRepair",
    "Converse",
    "DocumentIndex",
    "Environment",
    "EnvironmentAgent",
    "EnvironmentStep",
    "Experimenter",
    "Extract",
    "Fact",
    "GymEnvironment",
    "InvalidAction",
    "LeanAdapter",
    "MathQA",
    "McpServer",
    "Memory",
    "NimPlayer",
    "Passage",
    "Refine",
    "Retriever",
    "RuleBasedUser",
    "SchemaAdapter",
    "SimulatedUser",
    "TextRetriever",
    "TextToSQL",
    "ThinkingPolicy",
    "ToolAgent",
    "ToolUser",
    "UserProgram",
    "environment_seed",
    "load_program",
    "make_adapter",
    "open_database",
    "program_fields",
    "program_inputs",
    "program_state",
    "program_version",
    "restore_program",
]
