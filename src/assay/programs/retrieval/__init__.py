"""Retrieval: passages of documents, the index in the store, retrievers over it and over texts in memory."""

from assay.programs.retrieval.index import INDEX, DocumentIndex
from assay.programs.retrieval.retriever import Passage, Retriever, TextRetriever

__all__ = ["INDEX", "DocumentIndex", "Passage", "Retriever", "TextRetriever"]
