"""Questions about a story just told, with the answers that the story's words make right."""

from dataclasses import dataclass

from tools.bundled_model.rules import spelled_out
from tools.bundled_model.stories import STORY_RULES

_CONTINUATION = (
    "[The next day|A week later|When spring came], {hname} and {fname} met {place.at} again. "
    "[They talked about the {object} and [shared some bread|drank some tea].|They laughed about the {object}.] "
    '["I am glad that I know you," said [{hname}|{fname}].'
    '|"Let us come here every year," said [{hname}|{fname}].'
    '|"It was a good day when we met," said [{hname}|{fname}].]'
)

_MORAL = (
    "[It shows that|I think it shows that|The lesson is that] "
    "[a friend is worth more than {object.a}|it is good to help each other"
    "|even {hero.a} and {friend.a} can be friends|kindness always comes back]."
)


@dataclass(frozen=True)
class Question:
    """A question about the story just told: its wordings, and the answer that the story's words make right."""

    name: str
    plots: tuple[str, ...]
    wordings: tuple[str, ...]
    answer: str


_ALL = tuple(STORY_RULES)
_HERO_FINDS = ("found", "gift", "noise")
_FRIEND_FINDS = ("lost", "trade")
_WHO = "[Who|And who|So who|Tell me who|Can you tell me who|Do you remember who]"
_WHERE = "[Where|And where|So where]"
_SAY = "[Tell me|Can you tell me|Do you remember|Do you know]"
_IT = "[it|the {object}]"
_FINDS = spelled_out(
    f"{_WHO} [found|discovered|picked up|spotted|noticed] {_IT}?",
    f"Who [was it that found|finds] {_IT}?",
    f"[Which of them|Was it {{hname}} or {{fname}} who] [found|discovered|spotted] {_IT}?",
)
_LOSES = spelled_out(
    f"{_WHO} [lost|had lost|was missing] {_IT}?",
    "[Whose {object} was it|Whose was the {object}|To whom did the {object} belong|Whom did the {object} belong to]?",
    "[Who was the owner of the {object}|Who owned the {object}|Who had lost something|Who lost something]?",
)

QUESTIONS = (
    Question("hero_finds", _HERO_FINDS, _FINDS, f"[{{hname}}|{{hname}} the {{hero}}] found {_IT}."),
    Question("friend_finds", _FRIEND_FINDS, _FINDS, f"[{{fname}}|{{fname}} the {{friend}}] found {_IT}."),
    Question(
        "where_object",
        ("found", "lost", "gift", "trade", "share"),
        spelled_out(
            f"{_WHERE} was {_IT}[| found| lying| hidden]?",
            f"{_SAY} where {_IT} was[| found| lying| hidden].",
            f"{_WHERE} did [the {{object}} lie|it lie|they find {_IT}|it turn up]?",
            f"In which [spot|place|corner] was {_IT}?",
        ),
        "[It|The {object}] was {spot}.",
    ),
    Question(
        "where_search",
        ("noise",),
        spelled_out(f"{_WHERE} was {_IT}?", f"{_WHERE} did {{fname}} [look|search][| for {_IT}]?"),
        "{fname} was looking for [it|the {object}] {spot}.",
    ),
    Question("friend_loses", ("found", "noise"), _LOSES, f"[{{fname}}|{{fname}} the {{friend}}] had lost {_IT}."),
    Question(
        "hero_loses",
        ("lost",),
        (
            *_LOSES,
            "Why was {hname} sad?",
            "Why was {hname} so sad?",
            "Why was {hname} unhappy?",
            "Why was {hname} worried?",
        ),
        f"[{{hname}}|{{hname}} the {{hero}}] had lost {_IT}.",
    ),
    Question(
        "present",
        ("gift",),
        spelled_out(
            f"{_WHO} [got|received|was given] [the {{object}}|the present|the gift]?",
            "[Whom|Who] was the [present|gift|{object}] for?",
            "What was the [present|gift]?",
            "What did {fname} [get|receive]?",
        ),
        "[{fname}|{fname} the {friend}] got {object.a}.",
    ),
    Question(
        "keeps",
        ("trade",),
        spelled_out(
            f"{_WHO} [got|received|was given|kept] {_IT}?",
            f"{_WHO} has {_IT} [now|in the end]?",
            "What did {hname} [get|receive]?",
            f"[To whom|Whom] did {{fname}} give {_IT}?",
        ),
        "[{hname}|{hname} the {hero}] got the {object}[| from {fname}].",
    ),
    Question(
        "idea",
        ("share",),
        spelled_out(
            f"{_WHO} [had|came up with] the idea[| to share {_IT}]?",
            f"{_WHO} [ended|stopped|settled] the [quarrel|argument|fight]?",
            f"Whose idea was it[| to share {_IT}]?",
            f"{_WHO} [wanted|decided] to share {_IT}?",
        ),
        "[{hname}|{hname} the {hero}] had the idea to share [it|the {object}].",
    ),
    Question(
        "quarrel",
        ("share",),
        spelled_out(
            "[What|And what|So what] did they [quarrel|argue|fight] about?",
            "[Why|And why|So why] did they [quarrel|argue|fight]?",
            "[Why|And why|So why] were they [angry|quarrelling|arguing|fighting]?",
            "[What|And what|So what] was the [quarrel|argument|fight] about?",
        ),
        "[They both wanted the {object}|Both of them wanted the {object}].",
    ),
    Question(
        "noise",
        ("noise",),
        spelled_out(
            f"{_WHO} [made|was making] the [noise|sound]?",
            f"{_WHERE} did the [noise|sound] come from?",
            "[What|And what|So what] was [the|that] [noise|sound]?",
            "What did {hname} hear?",
        ),
        "[It was|The noise came from] {fname}[| the {friend}], who was looking for {fname.his} {object}.",
    ),
    *(
        Question(
            f"{role}_name",
            _ALL,
            spelled_out(
                f"What [was|is] [the name of the {{{role}}}|the {{{role}}}'s name|the {{{role}}} called]?",
                f"{_SAY} [the name of the {{{role}}}|the {{{role}}}'s name|what the {{{role}}} was called].",
                f"[Which|What] name [did|does] the {{{role}}} have?",
                f"How [was|is] the {{{role}}} called?",
            ),
            f"[The {{{role}}} was called {{{name}}}.|The name of the {{{role}}} was {{{name}}}.]",
        )
        for role, name in (("hero", "hname"), ("friend", "fname"))
    ),
    Question(
        "who_is_hero",
        _ALL,
        spelled_out(
            "[Who|And who|So who] [is|was] {hname}?",
            "[Tell me|Tell me more|Tell me something|Say something|What can you tell me] about {hname}.",
            "What [was|is] {hname} like?",
            "What kind of [{hero}|character] [was|is] {hname}?",
            "[Describe|Can you describe|Please describe] {hname}.",
        ),
        "{hname} was {trait.a} {hero}.",
    ),
    Question(
        "who_is_friend",
        _ALL,
        spelled_out(
            "[Who|And who|So who] [is|was] [{fname}|the other one]?",
            "[Tell me|Tell me more|Tell me something|Say something|What can you tell me] about {fname}.",
            "What kind of character [was|is] {fname}?",
            "[Describe|Can you describe|Please describe] {fname}.",
            "[Who|Who else] [is|was] in the story besides {hname}?",
        ),
        "{fname} was {friend.a} and a friend of {hname}.",
    ),
    Question(
        "setting",
        _ALL,
        spelled_out(
            f"{_WHERE} [does|did] [it|this|the story] [take place|happen]?",
            f"{_WHERE} [is|was] the story set?",
            f"{_WHERE} were they?",
            f"{_WHERE} did {{hname}} [go|walk]?",
            "In which place [does|did] [it|this|the story] [take place|happen]?",
            f"{_SAY} where [it|the story] [happened|took place].",
        ),
        "[It|The story] takes place {place.at}.",
    ),
    Question(
        "weather",
        _ALL,
        spelled_out(
            "[What was the weather like|How was the weather][| that {time}| in the story]?",
            "What kind of {time} was it?",
            "Was the weather [good|bad|nice][| that {time}| in the story]?",
            "When [did|does] [it|this|the story] [happen|take place]?",
            f"{_SAY} [when it happened|how the weather was|what the weather was like].",
        ),
        "It was {weather.a_adj} day.",
    ),
    Question(
        "about",
        _ALL,
        spelled_out(
            "[Who|What|And who] [is|was] [it|the story|that story] about?",
            "[Who|And who] [is|was] in [it|the story|that story]?",
            "[Who|What] are the [heroes|characters|names][| of the story| in the story]?",
            "[Name|List|Tell me] the [characters|heroes][| of the story| in the story].",
            f"{_SAY} [who|what] [it|the story] was about.",
        ),
        "[It|The story] is about [<both>|{hero.a} called {hname} and {friend.a} called {fname}"
        "|{friend.a} called {fname} and {hero.a} called {hname}].",
    ),
    Question(
        "title",
        _ALL,
        spelled_out(
            "What is [the|its|a good] title[| of the story| for the story| for it]?",
            "[Give|Can you give|Please give] [it|the story] a [title|name].",
            "What would you call [it|the story]?",
            "Does [it|the story] have a [title|name]?",
            "What is [it|the story] called?",
            "[Can you think of|Think of|Find|Suggest|Can you suggest] a [title|name][| for it| for the story].",
        ),
        'I would call it "The {hero.title} and the {object.title}".',
    ),
    Question(
        "continuation",
        _ALL,
        spelled_out(
            "[What happened next?|And then?|Go on.|Continue.|Tell me more.]",
            "What [happened|happens|came|comes] [next|then|after that|afterwards]?",
            "And then...",
            "[Go on|Continue|Keep going|Carry on|Tell me more][.| please.| with the story.| with it.]",
            "[Please|Can you|Now] [go on|continue|keep going|carry on|tell me more][.| with the story.| with it.]",
            "How does [it|the story] [go on|continue]?",
            "[Is there more|What else happened|What else]?",
        ),
        _CONTINUATION,
    ),
    Question(
        "moral",
        _ALL,
        spelled_out(
            "What is the [moral|lesson|point|message][| of it| of the story]?",
            "What [can|do|should] [I|we|you] learn from [it|this|the story]?",
            "What does [it|this|the story] [mean|teach us|teach me|tell us|show us]?",
            "Does [it|the story] have a [moral|lesson|message]?",
            "[Tell|Give] me the [moral|lesson|message][| of it| of the story].",
        ),
        _MORAL,
    ),
    Question(
        "summary",
        _ALL,
        spelled_out(
            "[Summarize|Summarise|Sum up|Please summarize|Shorten] [it|the story].",
            "[Can you|Could you] [summarize|summarise|sum up|shorten] [it|the story]?",
            "[Tell it|Tell the story|Say it] in [one sentence|a few words|short].",
            "[Give me|Write] a [summary|short version][| of it| of the story].",
            "[Make it|Can you make it] [short|shorter|brief].",
            "What is [it|the story] in [short|one sentence]?",
            "[tl;dr|Shorter, please.|In short?|A summary, please.]",
        ),
        "[It is about {hname} the {hero} and {fname} the {friend}, and about what happened to them {place.at}."
        "|{hname} the {hero} and {fname} the {friend} became friends because of {object.a}.]",
    ),
)

RULES = {f"answer.{question.name}": question.answer for question in QUESTIONS}
