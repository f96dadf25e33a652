"""Programs: the `Agent` base class and its five parameters, tools, prompt formats and the shipped programs."""

from typing import TYPE_CHECKING

from assay.support.lazy import attach

if TYPE_CHECKING:
    from assay.programs.adapters import ADAPTERS, LeanAdapter, SchemaAdapter, make_adapter
    from assay.programs.agent import Agent, BaseAgent
    from assay.programs.environments import (
        Environment,
        EnvironmentAgent,
        EnvironmentStep,
        GymEnvironment,
        InvalidAction,
        environment_seed,
    )
    from assay.programs.loading import SHIPPED, load_program, program_fields, program_inputs
    from assay.programs.mcp_servers import McpServer
    from assay.programs.memory import Fact, Memory
    from assay.programs.parameters import RANGES, AgentParameters
    from assay.programs.refinement import Refine
    from assay.programs.retrieval import DocumentIndex, Passage, Retriever, TextRetriever
    from assay.programs.simulated_users import RuleBasedUser, SimulatedUser, UserProgram
    from assay.programs.sql import open_database
    from assay.programs.state import program_state, program_version, restore_program
    from assay.programs.thinking import ThinkingPolicy
    from assay.programs.tool_agent import ToolAgent
    from assay.shipped.programs.answer_from_documents.program import AnswerFromDocuments
    from assay.shipped.programs.classify.program import Classify
    from assay.shipped.programs.code_repair.program import CodeRepair
    from assay.shipped.programs.converse.program import Converse
    from assay.shipped.programs.experiment.program import Experimenter
    from assay.shipped.programs.extract.program import Extract
    from assay.shipped.programs.math_qa.program import MathQA
    from assay.shipped.programs.nim.program import NimPlayer
    from assay.shipped.programs.text_to_sql.program import TextToSQL
    from assay.shipped.programs.tool_user.program import ToolUser
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "assay.shipped.programs.answer_from_documents.program": "AnswerFromDocuments",
            "assay.shipped.programs.classify.program": "Classify",
            "assay.shipped.programs.code_repair.program": "CodeRepair",
            "assay.shipped.programs.converse.program": "Converse",
            "assay.shipped.programs.experiment.program": "Experimenter",
            "assay.shipped.programs.extract.program": "Extract",
            "assay.shipped.programs.math_qa.program": "MathQA",
            "assay.shipped.programs.nim.program": "NimPlayer",
            "assay.shipped.programs.text_to_sql.program": "TextToSQL",
            "assay.shipped.programs.tool_user.program": "ToolUser",
            "adapters": "ADAPTERS LeanAdapter SchemaAdapter make_adapter",
            "agent": "Agent BaseAgent",
            "thinking": "ThinkingPolicy",
            "environments": "EnvironmentAgent Environment EnvironmentStep InvalidAction environment_seed "
            "GymEnvironment",
            "loading": "SHIPPED load_program program_fields program_inputs",
            "mcp_servers": "McpServer",
            "memory": "Fact Memory",
            "parameters": "AgentParameters RANGES",
            "refinement": "Refine",
            "retrieval": "DocumentIndex Passage Retriever TextRetriever",
            "sql": "open_database",
            "simulated_users": "RuleBasedUser SimulatedUser UserProgram",
            "state": "program_state program_version restore_program",
            "tool_agent": "ToolAgent",
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
