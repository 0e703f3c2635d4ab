"""The stories and poems that the bundled model tells, and the questions about a story with their right answers."""

from collections.abc import Sequence
from dataclasses import dataclass

from tools.bundled_model.rules import spelled_out

_OPENING = (
    "[Once upon a time there was {trait.a} {hero} [named|called] {hname}."
    "|Once there was {trait.a} {hero} called {hname}, who lived near the {place}."
    "|{hname} was {trait.a} {hero} who lived near the {place}."
    "|Near the {place} lived {trait.a} {hero} named {hname}."
    "|Not far from the {place} there lived {trait.a} {hero} whose name was {hname}."
    "|There was once {hero.a} named {hname}. {hname.He} was very {trait}."
    "|Long ago, {trait.a} {hero} named {hname} lived near the {place}."
    "|This is the story of {hname}, {trait.a} {hero}."
    "|Everybody near the {place} knew {hname}, {trait.a} {hero}.]"
)

_SETTING = (
    "[One {weather.adj} {time}, <hero_again> [walked|went|set out] to the {place}."
    "|One {time}, when {weather.happening}, <hero_again> [walked|went|set out] to the {place}."
    "|It was {weather.a_adj} {time}, and <hero_again> was [walking|resting|sitting] {place.at}."
    "|One {time}, while {weather.happening}, <hero_again> went to the {place} for a walk."
    "|<hero_again> was [alone|sitting] {place.at} one {weather.adj} {time}.]"
)

_FOUND = (
    "[There {hname.he} saw|Suddenly {hname.he} noticed|{hname.He} stopped, for there was] {object.a} {spot}. "
    '["Who could have lost it?" {hname.he} [thought|wondered]. '
    "|{hname.He} picked it up and [looked at it for a while|turned it over and over]. |]"
    "[Then|Just then|A little later] {fname} the {friend} came [by|along|down the path]. "
    '["Have you seen my {object}?" asked {fname}.|"I have lost my {object}," said {fname}.'
    "|{fname.He} was looking for {fname.his} {object}.] "
    '["Is this it?" asked {hname}, and {fname} [laughed with joy|jumped for joy|smiled].'
    "|{hname} gave it back at once, and {fname} was very [happy|grateful]."
    '|"Here it is," said {hname}. "It was {spot}."]'
)

_LOST = (
    "{hname.He} was [sad|unhappy|worried], for {hname.he} had lost {hname.his} {object}. "
    "[{hname.He} looked [here and there|everywhere|in every corner], but [it was gone|{hname.he} could not find it]. |]"
    "[Then|Soon|After a while] {fname} the {friend} came [by|along|down the path]. "
    '["Why do you look so sad?" asked {fname}. "I have lost my {object}," said {hname}.'
    '|"What are you looking for?" asked {fname}. "For my {object}," said {hname}.'
    "|{hname} told {fname.him} about the {object}.] "
    "[They searched together, and|They looked and looked until|It did not take long before] {fname} found it {spot}."
    '[| "Thank you!" [said|cried] {hname}.| {hname} thanked {fname} [again and again|with all {hname.his} heart].]'
)

_GIFT = (
    "{hname.He} [wanted|wished|hoped] to find a [present|gift] for {fname} the {friend}. "
    "[{hname.He} looked for a long time. |{hname.He} thought about it all the way. |At first there was nothing. |]"
    "[Then|At last] {hname.he} found {object.a} {spot}. "
    "{hname} [cleaned it|wrapped it in a leaf|put it into a bag] and [brought|took|carried] it to {fname}. "
    '["What a beautiful {object}!" [said|cried] {fname}.|"I have always wanted {object.a}!" [said|cried] {fname}.'
    '|"Is it really for me?" asked {fname}. "Of course it is," said {hname}.]'
)

_TRADE = (
    "There {hname.he} met {fname} the {friend}, who was carrying {object.a}. "
    '"Where did you find that {object}?" asked {hname}. "I found it {spot}," said {fname}. '
    '["I wish I had one, too," said {hname}. |{hname} looked at it and smiled. |]'
    '["Take it," said {fname}. "I [do not need it|have two of them|want you to have it]."'
    '|"You may keep it," said {fname}. "[I do not need it|I have two of them|It is a gift]."] '
    "[{hname} could hardly believe it|{hname} was so happy that {hname.he} began to sing|{hname} thanked {fname.him}]."
)

_SHARE = (
    "{hname.He} saw {object.a} {spot}, but {fname} the {friend} saw it[, too| at the same moment]. "
    '"It is mine!" [said|cried] {hname}. "No, it is mine!" [said|cried] {fname}. '
    "[They quarrelled until they were tired.|They argued for a long time.|Neither of them wanted to give in.] "
    "[Then|At last] {hname} had an idea. "
    '["Let us share it," {hname.he} said. |"We can share it," {hname.he} said. ]'
    '["You can have it today, and I will take it tomorrow."|"Then it belongs to both of us."] '
    "{fname} [nodded|agreed|liked the idea], and they [shook hands|stopped being angry|laughed about it]."
)

_NOISE = (
    "[Suddenly|All at once|Then] {hname.he} heard a [strange|soft|loud] noise. It came from {fname} the {friend}, who "
    "was looking for something {spot}. "
    '["What are you looking for?" asked {hname}. "My {object}," said {fname}.'
    '|"Have you lost something?" asked {hname}. "Yes, my {object}," said {fname}.'
    '|"Can I help you?" asked {hname}. "I am looking for my {object}," said {fname}.] '
    "[So they looked for it together|{hname} helped {fname.him} at once], "
    "and [soon|before long|a little later] {hname} found it."
    '[| "You have good eyes," said {fname}.| {fname} was very [happy|grateful].]'
)

# Who of the two is named first changes from story to story: a model that has learned the order, and not who is what,
# is corrected here.
_BOTH = (
    "[{hname} and {fname}|{fname} and {hname}"
    "|{hname} the {hero} and {fname} the {friend}|{fname} the {friend} and {hname} the {hero}]"
)

_ENDING = (
    "[[From that day on|After that], <both> were [good friends|the best of friends]."
    "|They [went|walked] home together, and both of them were happy."
    "|Until the stars came out, <both> sat together and [told stories|laughed|sang songs]."
    "|{hname} never forgot that {weather.adj} day."
    "|It had been a good day for <both>."
    "|In the end <both> were [happy|glad].]"
)

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

_POEM = (
    "[{hero.A} went walking one morning in May\nand came to the {place} at the end of the day."
    "|Near the {place} at evening, when all was at rest,\nthere sat an old {hero} who looked to the west."
    "|The {place} was silent, and darkness was near,\nbut {hname} the {hero} had nothing to fear."
    "|{hero.A} near the {place}, a long time ago,\nsat watching the stars and the lights down below.]\n"
    "[The {weather} was over, the sky became bright,\nand somebody's {object} shone softly that night."
    "|Through {weather} and darkness, with nothing to say,\na friend and {object.a} will show you the way."
    "|So let the {weather} come, and let the day end:\n{object.a} is worth less than the hand of a friend."
    "|I give you {object.a}, I give you this song,\nand {weather.the} will leave us before very long.]"
)

STORY_RULES = {
    "found": _FOUND,
    "lost": _LOST,
    "gift": _GIFT,
    "trade": _TRADE,
    "share": _SHARE,
    "noise": _NOISE,
}
"""The middle of each plot by its name."""

RULES = {
    "opening": _OPENING,
    "setting": _SETTING,
    "ending": _ENDING,
    "both": _BOTH,
    "hero_again": "[{hname}|{hname} the {hero}]",
    **{f"middle.{plot}": middle for plot, middle in STORY_RULES.items()},
    **{f"story.{plot}": f"<opening> <setting> <middle.{plot}> <ending>" for plot in STORY_RULES},
    "story": f"[{'|'.join(f'<story.{plot}>' for plot in STORY_RULES)}]",
    "poem": _POEM,
}


@dataclass(frozen=True)
class Question:
    """A question about the story just told: its wordings, and the answer that the story's words make right."""

    name: str
    plots: Sequence[str]
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

RULES |= {f"answer.{question.name}": question.answer for question in QUESTIONS}
