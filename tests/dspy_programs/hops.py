"""Multi-hop retrieval: each hop writes a query from the notes so far, the last step answers from all notes."""

import dspy

SHELVES = ("Counting goes up by one.", "A sum is what two numbers make together.", "Primes have two divisors.")


def search(query: str) -> str:
    """The note that shares most words with the query."""
    words = set(query.lower().split())
    return max(SHELVES, key=lambda note: len(words & set(note.lower().strip(".").split())))


class Program(dspy.Module):
    def __init__(self, hops: int = 2) -> None:
        super().__init__()
        self.hops = hops
        self.write_query = dspy.ChainOfThought("question, notes: list[str] -> query")
        self.respond = dspy.ChainOfThought("question, notes: list[str] -> answer")

    def forward(self, question: str) -> dspy.Prediction:
        notes: list[str] = []
        for _ in range(self.hops):
            notes.append(search(self.write_query(question=question, notes=notes).query))
        return dspy.Prediction(answer=self.respond(question=question, notes=notes).answer, notes=notes)
