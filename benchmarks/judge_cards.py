"""Labels of the shipped judges, drawn from public data, for their cards in `judges/README.md`.

RATINGS as in `judges.py`, BANKING77 is its `train.csv` (CC-BY-4.0). Writes a file for each
judge into OUT; then, for each NAME: `assay judge compile NAME --labels OUT/NAME.jsonl --optimizer calibrate --seed 0`.
The card of `better_answer` is from `pandalm.py`.
"""

import argparse
import csv
import json
import random
from collections.abc import Iterator
from pathlib import Path

from judges import ratings, write_labels

ITEMS = 300
MESSAGES = 200
PROBLEMS = """
Refund_not_showing_up balance_not_updated_after_bank_transfer card_not_working card_payment_not_recognised
card_swallowed cash_withdrawal_not_recognised compromised_card contactless_not_working declined_card_payment
declined_cash_withdrawal declined_transfer failed_transfer lost_or_stolen_card pin_blocked top_up_failed
transaction_charged_twice transfer_not_received_by_recipient unable_to_verify_identity virtual_card_not_working
wrong_amount_of_cash_received
"""
QUESTIONS = """
age_limit apple_pay_or_google_pay atm_support automatic_top_up card_acceptance card_delivery_estimate country_support
disposable_card_limits edit_personal_details exchange_rate exchange_via_app fiat_currency_support getting_spare_card
getting_virtual_card order_physical_card receiving_money supported_cards_and_currencies top_up_limits
verify_source_of_funds visa_or_mastercard
"""


def topics(file: Path) -> Iterator[dict[str, object]]:
    """Messages with a topic, every second with that of another message."""
    rows, rng = list(csv.DictReader(file.open(encoding="utf-8"))), random.Random(0)
    names = sorted({row["category"] for row in rows})
    for at, row in enumerate(rng.sample(rows, ITEMS)):
        is_right = at % 2 == 0
        topic = row["category"] if is_right else rng.choice([name for name in names if name != row["category"]])
        fields = {"input": {"text": row["text"]}, "output": {"label": topic.replace("_", " ")}}
        yield {"item_id": str(at), **fields, "rater": "banking77", "label": "yes" if is_right else "no"}


def messages(file: Path) -> Iterator[dict[str, object]]:
    """Messages that report a problem or ask for information, by their intent; as many of each."""
    rows, rng = list(csv.DictReader(file.open(encoding="utf-8"))), random.Random(0)
    for label, intents in (("yes", PROBLEMS), ("no", QUESTIONS)):
        texts = [row["text"] for row in rows if row["category"] in intents.split()]
        for at, text in enumerate(rng.sample(texts, MESSAGES // 2)):
            yield {"item_id": f"{label}{at}", "output": text, "rater": "banking77", "label": label}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("ratings", "banking77", "out"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    given.out.mkdir(exist_ok=True)
    write_labels(given.out / "sentiment.jsonl", ratings(given.ratings, "tweets"), ITEMS // 3, 0)
    for name, rows in (
        ("reports_problem", messages(given.banking77)),
        ("right_label", topics(given.banking77)),
    ):
        (given.out / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


if __name__ == "__main__":
    main()
