"""What `verified` claims: recall on planted values, by type and language, independent of the detector."""

import random
from collections.abc import Callable

import pytest
from export_rows import add_rollout, exported, store as store, turn

from assay.traces import Store
from assay.traces.export.hiding import Hider
from assay.traces.privacy.anonymizer import Anonymizer
from assay.traces.privacy.canaries import TYPES as PLANTED_TYPES, Canaries, Recall
from assay.traces.privacy.names import TYPES
from assay.traces.privacy.patterns import EntityMatch

TEXTS = {
    "en": "Please send the invoice to me, because the parcel has not arrived.",
    "de": "Bitte schicken Sie mir die Rechnung, denn das Paket ist nicht angekommen.",
    "fr": "Veuillez envoyer la facture, parce que le colis n'est pas arrivé chez nous.",
    "es": "Por favor, envíe la factura, porque el paquete no ha llegado.",
    "it": "La prego di mandare la fattura, perché il pacco non è arrivato.",
    "pt": "Por favor, envie a fatura para mim, porque a encomenda não chegou.",
    "nl": "Stuur de factuur op, want het pakket is niet aangekomen.",
    "ru": "Пришлите, пожалуйста, счёт: посылка не пришла.",
    "ja": "荷物が届いていないので、請求書を送ってください。",
    "zh": "包裹还没有到，请把发票寄给我。",
    "ko": "소포가 오지 않았으니 청구서를 보내 주세요.",
    "ar": "لم يصل الطرد بعد، يرجى إرسال الفاتورة.",
    "hi": "पार्सल नहीं आया है, कृपया बिल भेजिए।",
}
OTHERS = {
    "sv": "Vänligen skicka fakturan till mig så fort som möjligt, paketet har inte kommit.",
    "pl": "Proszę wysłać mi fakturę, ponieważ paczka jeszcze nie przyszła do nas.",
    "tr": "Lütfen faturayı en kısa sürede bana gönderin, paket hâlâ gelmedi maalesef.",
    "uk": "Надішліть, будь ласка, рахунок, бо посилка ще не прийшла, її немає.",
    "th": "กรุณาส่งใบแจ้งหนี้ให้ฉัน",
    "el": "Παρακαλώ στείλτε μου το τιμολόγιο.",
    "he": "נא לשלוח לי את החשבונית.",
    "fa": "لطفا صورت‌حساب را برای من بفرستید، پکیج نرسید.",
}


@pytest.fixture(scope="module")
def patterns() -> Callable[[str], list[EntityMatch]]:
    return Anonymizer(b"0" * 32, engine="patterns").find


@pytest.mark.parametrize("language", [*TEXTS, *OTHERS])
def test_every_language_is_recognised_or_named_as_not_tested(language: str) -> None:
    canaries = Canaries()
    canaries.see([TEXTS.get(language) or OTHERS[language]])
    assert dict(canaries.rows) == {language if language in TEXTS else "unknown": 1}
    assert canaries.not_tested == ({} if language in TEXTS else {"unknown": 1})


def test_a_row_has_every_language_of_its_texts() -> None:
    canaries = Canaries()
    fields = "Your input fields are:\n1. `mail` (str): the text of the mail\n"
    canaries.see([fields + TEXTS["de"], TEXTS["ja"], "山田太郎"])
    assert dict(canaries.rows) == {"en": 1, "de": 1, "ja": 1}
    canaries.see(["def add(a, b):\n    return a + b", "user", "42"])
    assert canaries.rows.total() == 3


@pytest.mark.slow
@pytest.mark.parametrize("language", ["en", "ja"])
def test_recall_is_measured_by_type_and_depends_on_the_detector_alone(
    patterns: Callable[[str], list[EntityMatch]], language: str
) -> None:
    def measured(find: Callable[[str], list[EntityMatch]]) -> dict[str, Recall]:
        canaries = Canaries(seed=3)
        canaries.see([TEXTS[language]])
        recall = canaries.recall(find)
        assert list(recall) == [language]
        return dict(recall[language])

    found = measured(patterns)
    assert tuple(found) == PLANTED_TYPES
    assert found == measured(patterns)
    assert (found["person"].found, found["person"].verified) == (0, False)
    assert found["email"].verified
    everything = measured(lambda text: [EntityMatch("person", 0, len(text), "")])
    nothing = measured(lambda text: [])
    assert all(result.verified for result in everything.values())
    assert not any(result.found for result in nothing.values())
    # a detector that misses one letter of each value has not found it
    cut = measured(lambda text: [EntityMatch("person", m.start + 1, m.end, "") for m in patterns(text)])
    assert cut["email"].found == 0


@pytest.mark.parametrize(
    ("found", "low", "verified"), [(120, 0.969, True), (119, 0.954, True), (118, 0.941, False), (0, 0.0, False)]
)
def test_a_type_is_verified_by_the_lower_bound_of_its_recall(found: int, low: float, verified: bool) -> None:
    # Wilson, n = 120, z = 1.96: 120 / (120 + 3.8416) = 0.969 if all are found
    result = Recall(found, 120).to_dict()
    assert result["interval"][0] == pytest.approx(low, abs=0.0006)
    assert (result["recall"], result["verified"]) == (round(found / 120, 3), verified)


def hider_of(*texts: str, find: Callable[[str], list[EntityMatch]] | None = None) -> Hider:
    hider = Hider("patterns", None)
    for text in texts:
        hider.row({"input": text}, ())
    if find is not None:
        assert hider.anonymizer is not None
        hider.anonymizer.find = find  # type: ignore[method-assign]
    return hider


def everything(text: str, known: object = ()) -> list[EntityMatch]:
    return [EntityMatch("person", 0, len(text), "")]


@pytest.mark.slow
def test_a_clean_second_pass_alone_verifies_nothing() -> None:
    for texts in ([TEXTS["en"]], [TEXTS["ja"]], ["42"]):
        hider = hider_of(*texts)
        assert (hider.residual, hider.state, hider.to_dict()["verified"]) == (0, "patterns only", False)
    assert hider_of().state == "failed"


def test_an_export_is_verified_only_if_all_its_languages_are_tested_and_all_types_are_found() -> None:
    assert hider_of(TEXTS["en"], TEXTS["ja"], find=everything).state == "verified"
    assert hider_of(TEXTS["en"], OTHERS["th"], find=everything).state == "patterns only"
    assert hider_of("42", find=everything).state == "patterns only"
    report = hider_of(TEXTS["en"], OTHERS["th"], find=everything).to_dict()
    assert report["languages_not_tested"] == {"unknown": 1}
    assert report["recall"]["en"]["person"]["verified"]
    assert set(report["types_not_tested"]) == set(TYPES) - set(PLANTED_TYPES)


def test_a_detector_that_misses_a_share_of_one_type_is_not_verified() -> None:
    rng = random.Random(1)
    hider = hider_of(TEXTS["en"], find=lambda text: everything(text) if "@" not in text or rng.random() > 0.1 else [])
    recall = hider.to_dict()["recall"]["en"]
    assert [kind for kind, result in recall.items() if not result["verified"]] == ["email"]
    assert hider.state == "patterns only"


@pytest.mark.slow
def test_an_export_with_names_left_is_not_called_verified_and_has_no_planted_value(store: Store) -> None:
    for at, name in enumerate(("山田太郎", "佐藤健", "渡辺さくら")):
        answer = f"{name}様、申し訳ございません。"
        add_rollout(store, turn(0, f"{name}様より：荷物が届いていません。", answer), task=f"t{at}")
    add_rollout(store, turn(0, TEXTS["en"], "It is on its way to you."))
    rows, manifest = exported(store, "sft")
    privacy = manifest["privacy"]
    assert (privacy["state"], privacy["verified"], privacy["found"]) == ("patterns only", False, {})
    assert privacy["languages"] == {"ja": 3, "en": 1}
    names = privacy["recall"]["ja"]["person"]
    assert (names["verified"], names["planted"]) == (False, 120)
    assert TEXTS["en"] in [row["prompt"][0]["content"] for row in rows]
    hider = hider_of(TEXTS["en"])
    hider.to_dict()
    assert hider.anonymizer is not None
    assert hider.anonymizer.table == {}
