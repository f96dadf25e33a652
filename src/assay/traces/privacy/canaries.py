# ruff: noqa: E501 (sentences in several scripts)
"""Measures a detector's recall on planted values: invented personal data in copies of the user's own texts.

Independent of the detectors: names are put together from syllables, numbers and addresses from the formats below, and
no list, pattern or library of theirs is used. Half of the values stand in a sentence of their language that is inserted
between two lines, half stand alone between two words of the text.

A claim holds for one type in one language. Languages are recognised line by line: by script, or by frequent words.
"""

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import regex

from assay.traces.privacy.patterns import EntityMatch

TYPES = ("person", "email", "phone", "address", "id", "iban", "card", "ip")
PLANTED = 120  # values by type and language: with one missed, the lower bound of the recall is 0.954, with two 0.941
REQUIRED_RECALL = 0.95  # lower bound of the recall from which a type is verified
UNKNOWN = "unknown"
_SAMPLES, _WINDOW = 50, 200  # texts by language that values are planted in, and their characters


@dataclass(frozen=True)
class Recall:
    """Planted values of one type in one language that a detector found completely."""

    found: int
    planted: int

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval (Wilson 1927, JASA 22:209)."""
        n, p, z2 = self.planted, self.found / self.planted, 1.96**2
        middle, reach = p + z2 / (2 * n), math.sqrt(z2 * (p * (1 - p) + z2 / (4 * n)) / n)
        return max(0.0, (middle - reach) / (1 + z2 / n)), min(1.0, (middle + reach) / (1 + z2 / n))

    @property
    def verified(self) -> bool:
        return self.interval[0] >= REQUIRED_RECALL

    def to_dict(self) -> dict[str, Any]:
        interval = [round(bound, 3) for bound in self.interval]
        share = round(self.found / self.planted, 3)
        return {
            "planted": self.planted, "found": self.found, "recall": share, "interval": interval,
            "verified": self.verified,
        }  # fmt: skip


class Canaries:
    """Samples texts by language, and measures a detector on values planted in them.

    Args:
        seed: Decides which texts are sampled and what is planted where.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.rows = Counter[str]()  # by language; a row may have several
        self._rng = random.Random(seed)
        self._samples: dict[str, list[str]] = {}
        self._recall: dict[str, dict[str, Recall]] = {}
        self._measured = 0

    def see(self, texts: Iterable[str]) -> None:
        """Count the languages of a row and perhaps sample it.

        Args:
            texts: All texts of the row.
        """
        where: dict[str, str] = {}
        for text in texts:
            for at, language in _languages(text):
                if language not in where:
                    where[language] = text[max(0, at - _WINDOW // 2) : at + _WINDOW // 2]
        if "zh" in where and "ja" in where:  # lines without kana in a Japanese row
            del where["zh"]
        for language, window in where.items():
            self.rows[language] += 1
            samples = self._samples.setdefault(language, [])
            if len(samples) < _SAMPLES:
                samples.append(window)
            elif (place := self._rng.randrange(self.rows[language])) < _SAMPLES:
                samples[place] = window

    @property
    def not_tested(self) -> dict[str, int]:
        """Rows by language for which there are no canaries."""
        return {language: count for language, count in sorted(self.rows.items()) if language not in _LANGUAGES}

    def recall(self, find: Callable[[str], list[EntityMatch]]) -> Mapping[str, Mapping[str, Recall]]:
        """Recall of a detector by language and type, measured once for the texts seen so far."""
        if self._measured != self.rows.total():
            languages = [language for language in sorted(self.rows) if language in _LANGUAGES]
            self._recall = {
                language: {kind: self._planted(find, language, kind) for kind in TYPES} for language in languages
            }
            self._measured = self.rows.total()
        return self._recall

    def _planted(self, find: Callable[[str], list[EntityMatch]], language: str, kind: str) -> Recall:
        rng, found = random.Random(f"{self.seed} {language} {kind}"), 0
        for at in range(PLANTED):
            value = _value(rng, language, kind)
            text, start = _plant(rng, rng.choice(self._samples[language]), language, kind, value, alone=at % 2 == 1)
            hidden = {c for match in find(text) for c in range(match.start, match.end)}
            found += all(c in hidden for c in range(start, start + len(value)) if text[c].isalnum())
        return Recall(found, PLANTED)


# -- languages

_KANA, _HAN = regex.compile(r"[\p{Hiragana}\p{Katakana}]"), regex.compile(r"\p{Han}")
_SCRIPTS = (
    ("ko", regex.compile(r"\p{Hangul}")),
    ("hi", regex.compile(r"\p{Devanagari}{2}")),
    ("ar", regex.compile(r"\p{Arabic}{2}")),
    ("ru", regex.compile(r"\p{Cyrillic}{2}")),
)
_OTHERS = {  # letters of other languages that are written in these scripts
    "ar": regex.compile(r"[پچژگکیٹڈڑےھ]"),
    "ru": regex.compile(r"[іїєґўђјљњћџѓќ]|(?<!\w)(?:от|със|към|беше|което)(?!\w)", regex.I),
}
_OTHER_SCRIPT = regex.compile(r"(?![\p{Latin}\p{Common}\p{Inherited}\p{Han}\p{Hiragana}\p{Katakana}\p{Hangul}\p{Devanagari}\p{Arabic}\p{Cyrillic}])\p{L}{2}")  # fmt: skip
_FREQUENT = {
    "en": "the of and to is that for it with you this are on be was have not your from as by or what which if",
    "de": "der die und das ist nicht ein eine zu mit für auf sich auch ich sie wir von dem bei wie wird haben",
    "fr": "le les et est une dans pour pas que qui sur avec vous des du je nous il au ce sont mais plus",
    "es": "el los las y es una para por con no que del su se como más pero lo en muy está",
    "it": "il di che è una per non con gli della sono nel del alla anche come più ma ho si",
    "pt": "os um uma para não com que do da em no na por mais como mas foi ao são você é",
    "nl": "het een van ik niet dat die op te met voor zijn aan er maar wordt ook bij naar heeft",
}
_WORDS = {language: frozenset(words.split()) for language, words in _FREQUENT.items()}
_LATIN = regex.compile(r"(?<![\w@./#-])[\p{Latin}'’]+(?![\w@/]|[.-]\w)")
_LINE = re.compile(r"[^\n]{1,500}")


def _languages(text: str) -> Iterator[tuple[int, str]]:
    """Position and language of each line that has one."""
    for line in _LINE.finditer(text):
        for language in _of_line(line[0]):
            yield line.start(), language


@lru_cache(maxsize=20_000)
def _of_line(line: str) -> tuple[str, ...]:
    languages = []
    if not line.isascii():
        if _KANA.search(line):
            languages.append("ja")
        elif _HAN.search(line):
            languages.append("zh")
        for language, script in _SCRIPTS:
            if script.search(line):
                languages.append(UNKNOWN if language in _OTHERS and _OTHERS[language].search(line) else language)
        if _OTHER_SCRIPT.search(line):
            languages.append(UNKNOWN)
    words = [word.lower() for word in _LATIN.findall(line)]
    if len(words) >= 4:
        counts = {language: sum(word in known for word in words) for language, known in _WORDS.items()}
        best = max(counts, key=counts.__getitem__)
        if counts[best] >= max(1, 0.12 * len(words)):
            languages.append(best)
        elif len(words) >= 8:  # shorter lines are often code, titles and lists
            languages.append(UNKNOWN)
    return tuple(languages)


# -- values


@dataclass(frozen=True)
class _Language:
    """Syllables and formats of a language. `#` is a digit, `@` a capital letter; `|` separates alternatives.

    Args:
        given, family: Syllables of names.
        name: Forms of a full name.
        email, phone, address, other: Sentences; `other` for numbers of all kinds.
    """

    given: str
    family: str
    phones: str
    streets: str
    ids: str
    person: str
    email: str
    phone: str
    address: str
    other: str
    name: str = "{given} {family}|{given} {family}|{given} {initial}. {family}"


_LANGUAGES = {
    "en": _Language(
        given="ka bren lo dar shi mel ro wen ta vin jes ne", family="holt mar wick dun tre vask lin gar pel son ker bry",
        phones="(2##) 7##-####|+1 415 ### ####|07### ######|+44 20 7### ####",
        streets="## {family} Road|### {family} Street|# {family} Lane", ids="4##-##-####|5##-##-####",
        person="Please ask {v} about the invoice.|{v} has not answered since Monday.|I spoke to {v} this morning.|The notes were taken by {v} and sent on.|Thanks and regards,\n{v}|Is {v} still on leave?",
        email="You can reach me at {v}.|{v} gets a copy of this.", phone="Call {v} after five.|My number is {v}, thanks.",
        address="The parcel goes to {v}.|We moved to {v} last year.", other="It is {v}, as I said.|Please check {v} for me.",
    ),
    "de": _Language(
        given="an ke jör ul fri the dor wil hei ma lu gre", family="brück hof wes ter mei lam stet kro ber nau vogt eck",
        phones="0171 #######|030 ########|+49 89 #######|0221/######", streets="{family}straße ##|{family}weg #|Am {family} ##",
        ids="L@@#@##@#|T########",
        person="Bitte fragen Sie {v} nach der Rechnung.|{v} hat sich seit Montag nicht gemeldet.|Ich habe heute mit {v} gesprochen.|Das Protokoll wurde von {v} geschrieben.|Mit freundlichen Grüßen\n{v}",
        email="Sie erreichen mich unter {v}.|{v} bekommt eine Kopie.", phone="Rufen Sie mich unter {v} an.|Meine Nummer ist {v}, danke.",
        address="Das Paket geht an {v}.|Wir wohnen jetzt {v} im zweiten Stock.", other="Es ist {v}, wie gesagt.|Bitte prüfen Sie {v} für mich.",
    ),
    "fr": _Language(
        given="ma lou gé cé o ré lie dine thi bau jo el", family="mont bel lac du val roch char tier gran ville ber nard",
        phones="06 ## ## ## ##|01 ## ## ## ##|+33 6 ## ## ## ##", streets="## rue {family}|# avenue de {family}|## chemin du {family}",
        ids="1 8# 05 78 0## 0## ##|##@@#####",
        person="Veuillez demander la facture à {v}.|{v} n'a pas répondu depuis lundi.|J'ai parlé avec {v} ce matin.|Le rapport est de {v} et de son équipe.|Cordialement,\n{v}",
        email="Vous pouvez m'écrire à {v}.|{v} est en copie.", phone="Appelez le {v} après cinq heures.|Mon numéro est le {v}, merci.",
        address="Le colis est pour le {v}.|Nous habitons {v} depuis mars.", other="C'est {v}, comme je disais.|Merci de vérifier {v} pour moi.",
    ),
    "es": _Language(
        given="ma ri be to lu ce do lo an ja ne ro", family="mo rel val dez qui ro ga man var gue cas tra",
        phones="6## ### ###|91 ### ## ##|+34 6## ## ## ##", streets="Calle {family} ##|Avenida de {family} #|Plaza {family} ##", ids="########@|X#######@",
        person="Por favor, pregunte a {v} por la factura.|{v} no ha contestado desde el lunes.|Esta mañana hablé con {v} por teléfono.|El informe es de {v} y de su equipo.|Un saludo,\n{v}",
        email="Me puede escribir a {v}.|{v} recibe una copia.", phone="Llame al {v} después de las cinco.|Mi número es el {v}, gracias.",
        address="El paquete es para {v}.|Vivimos en {v} desde marzo.", other="Es {v}, como dije.|Por favor, compruebe {v} por mí.",
        name="{given} {family}|{given} {family} {family}",
    ),
    "it": _Language(
        given="gi a lu ca ne rea mi che le sandra to nia", family="ber ti ros cac ci mar tel li fon ta nel dri",
        phones="3## ### ####|06 ########|+39 3## #######", streets="Via {family} ##|Viale {family} #|Piazza {family} ##", ids="@@@@@@8#@##@###@|@@#####@@",
        person="Per favore, chieda a {v} della fattura.|{v} non risponde da lunedì.|Stamattina ho parlato con {v} al telefono.|La relazione è di {v} e del suo gruppo.|Cordiali saluti\n{v}",
        email="Mi può scrivere a {v}.|{v} riceve una copia.", phone="Chiami il {v} dopo le cinque.|Il mio numero è {v}, grazie.",
        address="Il pacco è per {v}.|Abitiamo in {v} da marzo.", other="È {v}, come dicevo.|Per favore, controlli {v} per me.",
    ),
    "pt": _Language(
        given="jo ana lu cé li a fer nan ra ca vi tor", family="fi guei mon tei va les cou ti nho bra gan ça",
        phones="(11) 9####-####|21 ####-####|+351 91# ### ###", streets="Rua {family}, ##|Avenida {family}, #|Travessa {family}, ##", ids="###.###.###-##|########",
        person="Por favor, pergunte a {v} sobre a fatura.|{v} não responde desde segunda.|Hoje falei com {v} por telefone.|O relatório é de {v} e da sua equipa.|Cumprimentos,\n{v}",
        email="Pode escrever para {v}.|{v} recebe uma cópia.", phone="Ligue para {v} depois das cinco.|O meu número é {v}, obrigado.",
        address="A encomenda é para {v}.|Moramos na {v} desde março.", other="É {v}, como eu disse.|Por favor, confira {v} para mim.",
    ),
    "nl": _Language(
        given="ge rit san ne bram fem ke wou ter lot joos ta", family="dijk ho ven meer stra bos wal kra mer broek lin den",
        phones="06-########|020 ### ####|+31 6 ########", streets="{family}straat ##|{family}laan #|{family}weg ##", ids="#########|@@#####@#",
        person="Vraag {v} even naar de factuur.|{v} heeft sinds maandag niet gereageerd.|Ik sprak vanochtend met {v} aan de telefoon.|Het verslag is van {v} en het team.|Met vriendelijke groet,\n{v}",
        email="U kunt mij bereiken via {v}.|{v} krijgt een kopie.", phone="Bel {v} na vijf uur.|Mijn nummer is {v}, bedankt.",
        address="Het pakket gaat naar {v}.|Wij wonen nu aan de {v} in de stad.", other="Het is {v}, zoals gezegd.|Wilt u {v} voor mij nakijken?",
        name="{given} {family}|{given} van {family}|{given} {initial}. {family}",
    ),
    "ru": _Language(
        given="ал мир рос ла ве ди зор та ни ки ан ля", family="бе лов рин ков ский ман дуб ров кин зай цев вол",
        phones="+7 9## ###-##-##|8 (495) ###-##-##", streets="ул. {family}, ##|проспект {family}, д. #", ids="#### ######|###-###-### ##",
        person="Пожалуйста, спросите {v} о счёте.|{v} не отвечает с понедельника.|Сегодня утром звонит {v} и ждёт ответа.|С уважением,\n{v}",
        email="Мой адрес {v}, пишите.|{v} получит копию.", phone="Звоните по номеру {v} после пяти.|Мой телефон {v}, спасибо.",
        address="Посылку везите на {v}.|Мы живём на {v} с марта.", other="Это {v}, как я сказал.|Проверьте, пожалуйста, {v} ещё раз.",
        name="{given} {family}|{family} {given}|{given} {initial}. {family}",
    ),
    "ja": _Language(
        given="美 香 健 太 子 翔 真 陽 菜 大 樹 里 沙 介", family="山 川 木 村 野 崎 原 沢 島 谷 井 松 坂 藤",
        phones="090-####-####|03-####-####|+81 90 #### ####", streets="{family}町#丁目#-#|東京都{family}区#-##-#", ids="#### #### ####|@@#######",
        person="請求書については{v}さんに聞いてください。|月曜日から{v}様の返事がありません。|今朝、{v}と話しました。|担当者は{v}です。|お名前：{v}",
        email="連絡先は{v}です。|{v}にも送ってください。", phone="五時以降に{v}へ電話してください。|電話番号は{v}です。",
        address="荷物は{v}に送ってください。|去年、{v}に引っ越しました。", other="番号は{v}です。|{v}を確認してください。",
        name="{family}{given}|{family} {given}",
    ),
    "zh": _Language(
        given="伟 芳 娜 敏 静 丽 强 磊 军 洋 勇 艳 杰 涛", family="王 李 张 刘 陈 杨 赵 黄 周 吴 徐 孙 胡 朱",
        phones="13# #### ####|010-########|+86 13# #### ####", streets="{given}{given}路##号|{given}{given}街#号", ids="11010119900#######|E########",
        person="请向{v}询问发票的事。|{v}从星期一起没有回复。|今天早上我和{v}通了电话。|报告是{v}写的。|此致\n{v}",
        email="我的邮箱是{v}。|请抄送{v}。", phone="请在五点后拨打{v}。|我的电话是{v}，谢谢。",
        address="包裹请寄到{v}。|我们去年搬到了{v}。", other="号码是{v}。|请帮我核对{v}。", name="{family}{given}",
    ),
    "ko": _Language(
        given="민 준 서 연 지 우 현 영 수 진 하 은 도 윤", family="김 이 박 최 정 강 조 윤 장 임 한 오 서 신",
        phones="010-####-####|02-###-####|+82 10-####-####", streets="{given}{given}로 ##|{given}{given}길 #", ids="900###-1######|M########",
        person="청구서는 {v} 씨에게 물어보세요.|{v}님이 월요일부터 답이 없습니다.|오늘 아침 {v} 과장과 통화했습니다.|보고서는 {v}이 작성했습니다.",
        email="제 메일은 {v}입니다.|{v}에게도 보내 주세요.", phone="다섯 시 이후에 {v}로 전화 주세요.|제 번호는 {v}입니다.",
        address="소포는 {v}로 보내 주세요.|작년에 {v}로 이사했습니다.", other="번호는 {v}입니다.|{v}를 확인해 주세요.", name="{family}{given}",
    ),
    "ar": _Language(
        given="سا مر نا دي كا ري لي فا هد ما جد رم", family="الحا رثي الم نصو ري الع مري الد وسي الش مال",
        phones="05# ### ####|+966 5# ### ####|+20 10 #### ####", streets="شارع {family} ##|## شارع {family}", ids="1#########|@########",
        person="يرجى سؤال {v} عن الفاتورة.|لم يرد {v} منذ يوم الاثنين.|تحدثت هذا الصباح مع {v} هاتفيا.|مع التحية\n{v}",
        email="بريدي هو {v} من فضلك.|أرسل نسخة إلى {v} أيضا.", phone="اتصل على {v} بعد الخامسة.|رقمي هو {v} وشكرا.",
        address="أرسل الطرد إلى {v} اليوم.|نسكن في {v} منذ مارس.", other="الرقم هو {v} كما قلت.|يرجى مراجعة {v} مرة أخرى.", name="{given} {family}",
    ),
    "hi": _Language(
        given="रा जी सु नी ता मो हन अ मित की र्ति वी", family="वर मा शर गुप त कुल दे सिन हा चौ धरी नाथ",
        phones="98### #####|+91 98### #####|011-2#######", streets="## {family} मार्ग|{family} नगर, मकान #", ids="#### #### ####|@@@@@####@",
        person="बिल के बारे में {v} से पूछिए।|{v} ने सोमवार से जवाब नहीं दिया।|आज सुबह मैंने {v} से बात की।|सादर,\n{v}",
        email="मेरा ईमेल {v} है।|{v} को भी भेजिए।", phone="पाँच बजे के बाद {v} पर फ़ोन कीजिए।|मेरा नंबर {v} है।",
        address="पार्सल {v} पर भेजिए।|हम पिछले साल {v} में आए।", other="यह {v} है, जैसा मैंने कहा।|कृपया {v} जाँच लीजिए।", name="{given} {family}",
    ),
}  # fmt: skip
_EMAIL_SYLLABLES = "ba ko lin ter va mo ric des pu fa nel hor wy zan ti qua"
_IBANS = {
    "GB": "@@@@##############",
    "DE": "##################",
    "FR": "#######################",
    "ES": "####################",
}


def _value(rng: random.Random, language: str, kind: str) -> str:
    spec = _LANGUAGES[language]
    match kind:
        case "person":
            return _filled(rng, spec, spec.name)
        case "email":
            local = rng.choice((".", "_", "")).join(_word(rng, _EMAIL_SYLLABLES) for _ in range(2))
            return (
                f"{local}@{_word(rng, _EMAIL_SYLLABLES)}.{rng.choice(('com', 'net', 'org', 'de', 'fr', 'co.uk', 'jp'))}"
            )
        case "phone":
            return _filled(rng, spec, spec.phones)
        case "address":
            return _filled(rng, spec, spec.streets)
        case "id":
            return _filled(rng, spec, spec.ids)
        case "iban":
            country = rng.choice(sorted(_IBANS))
            body = _digits(rng, _IBANS[country])
            number = "".join(str(int(c, 36)) for c in f"{body}{country}00")
            return f"{country}{98 - int(number) % 97:02d}{body}"
        case "card":
            body = _digits(rng, "4##############")
            total = sum(sum(divmod(int(c) * (2 - at % 2), 10)) for at, c in enumerate(body))
            number = f"{body}{-total % 10}"
            return rng.choice((number, " ".join(number[at : at + 4] for at in range(0, 16, 4))))
        case _:
            return f"{rng.choice((80, 91, 141, 185))}.{'.'.join(str(rng.randint(33, 254)) for _ in range(3))}"


def _filled(rng: random.Random, spec: _Language, forms: str) -> str:
    parts = re.split(r"(\{\w+\})", rng.choice(forms.split("|")))
    names = {
        "{given}": lambda: _word(rng, spec.given),
        "{family}": lambda: _word(rng, spec.family),
        "{initial}": lambda: _word(rng, spec.given)[0],
    }
    return "".join(names[part]() if part in names else _digits(rng, part) for part in parts)


def _word(rng: random.Random, syllables: str) -> str:
    """A name of two or three syllables; of one or two where a syllable is a letter or sign."""
    single = len(syllables.split()[0]) == 1 and not syllables.isascii()
    word = "".join(rng.sample(syllables.split(), rng.choice((1, 2) if single else (2, 2, 3))))
    return word if syllables is _EMAIL_SYLLABLES else word.capitalize()


def _digits(rng: random.Random, form: str) -> str:
    first = {"#": "123456789", "@": "ABCDEFGHJKLMNPRSTVWXYZ"}
    return "".join(rng.choice(first[c]) if c in first else c for c in form)


_BETWEEN_WORDS = regex.compile(r"(?<=\p{Ll}) (?=\p{Ll})")
_BETWEEN_LETTERS = regex.compile(r"(?<=\p{Lo}) ?(?=\p{Lo})")


def _plant(rng: random.Random, sample: str, language: str, kind: str, value: str, *, alone: bool) -> tuple[str, int]:
    """A copy of a text with the value in it, and the value's position."""
    gaps = (
        [m.span() for pattern in (_BETWEEN_WORDS, _BETWEEN_LETTERS) for m in pattern.finditer(sample)] if alone else []
    )
    if gaps:
        start, end = rng.choice(gaps)
        before, after = sample[:start] + " ", " " + sample[end:]
    else:
        spec = _LANGUAGES[language]
        carriers = {"person": spec.person, "email": spec.email, "phone": spec.phone, "address": spec.address}
        head, _, tail = rng.choice(carriers.get(kind, spec.other).split("|")).partition("{v}")
        place = rng.choice([0, *(m.end() for m in re.finditer(r"\n", sample)), len(sample)])
        before, after = f"{sample[:place].rstrip()}\n{head}", f"{tail}\n{sample[place:]}"
    return before + value + after, len(before)
