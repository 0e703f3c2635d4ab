"""Small talk, explanations, and the graceful answers to all that the bundled model does not know."""

from dataclasses import dataclass

from tools.bundled_model.rules import spelled_out

_SUGGESTION = (
    "[Ask me about {some_hero.a}, {some_place.a} or {some_object.a}."
    "|Try {some_hero.a}, {some_place.a} or {some_object.a}."
    "|I can tell you a story about {some_hero.a}, {some_place.a} or {some_object.a}."
    "|Shall I tell you about {some_hero.a}, {some_place.a} or {some_object.a}?]"
)


@dataclass(frozen=True)
class Talk:
    """One thing that people say to a chat model apart from asking for stories: its wordings and the answer."""

    name: str
    wordings: tuple[str, ...]
    answer: str


TALKS = (
    Talk(
        "hello",
        spelled_out(
            "[hello|hi|hey|hello there|good morning]",
            "[hello|hi|hey][| there| again| friend| model| penstock| everybody| world][|!|, nice to meet you]",
            "good [morning|evening|afternoon|day][| to you|, friend|, penstock]",
            "[greetings|howdy|hiya|yo|hola|bonjour|hallo|ciao|hi hi|hello, hello|morning|test|ping|testing|salut]",
            "[is anybody there|is anyone there|are you there|anybody there|can you hear me|anyone home]?",
        ),
        "[Hello!|Hi there!|Good day!] [I am the small model that comes with Penstock. |]<suggestion>",
    ),
    Talk(
        "who",
        spelled_out(
            "[Who are you|What are you|What is your name|Which model are you|Are you an AI]?",
            "[Who|What] [are you|exactly are you|am I talking to|is this|am I chatting with]?",
            "[What|Which] [model|bot|AI] [are you|is this|am I talking to]?",
            "Are you [a robot|a bot|an AI|human|a person|a real person|a language model|a machine|real|ChatGPT]?",
            "[Do you have a name|What's your name|What is your name|How are you called|What should I call you]?",
            "[Tell me about|Introduce|Describe|Say something about|Tell me something about] yourself.",
        ),
        "I am the small model that comes with Penstock. "
        "[I know small stories and a few plain facts.|I am tiny, but I know many small stories.] <suggestion>",
    ),
    Talk(
        "maker",
        spelled_out(
            "Who [made|created|trained|built|invented|programmed|wrote] you?",
            "[How|When|Where] were you [made|created|trained|built]?",
            "[What data were you|What were you|On what were you] trained on?",
            "How [big|old|large|small] are you?",
            "How many [parameters|layers|weights] do you have?",
            "[Where do you come from|How do you work|What are you made of|What is your age]?",
        ),
        "A script of Penstock trained me [from scratch|in a few minutes]. "
        "[All my stories come from a small grammar.|I have read nothing but small stories.] <suggestion>",
    ),
    Talk(
        "can",
        spelled_out(
            "[What can you do?|What do you know?|Can you help me?|Help|How can you help me?]",
            "What can [you do for me|you tell me|I ask you|I ask|we talk about|I do here|you talk about|you write]?",
            "What [are you good at|are your skills|are you able to do|should I ask|do you know about|else can you do]?",
            "[I need|I want|Give me|Can I have] [help|some help|ideas|some ideas].",
            "[Show|Tell] me what you can [do|tell|write].",
            "[Help me|menu|options|help please|how does this work?|commands]",
        ),
        "I can tell [small stories|small stories and poems], answer questions about them and explain a few words. "
        "<suggestion>",
    ),
    Talk(
        "how",
        spelled_out(
            "How are you[| doing| feeling][| today]?",
            "[hello|hi|hey], how are you[| doing| today]?",
            "How [is it going|do you feel|do you do|have you been|was your day|is life|are things]?",
            "Are you [well|okay|happy|tired|fine|sad|feeling well][| today]?",
            "[What's up|Is everything fine|Is everything okay|Is everything all right|How goes it]?",
        ),
        "I am [well|fine], thank you. <suggestion>",
    ),
    Talk(
        "thanks",
        spelled_out(
            "[thanks|thank you|thank you very much|thanks a lot|many thanks]",
            "[ok|cool|great|good|nice|perfect], [thanks|thank you]",
            "[thanks|thank you][| a lot| so much| very much] for [the story|your help|that|telling me|the answer]",
            "[thanks|thank you], that [was|is] [nice|lovely|great|helpful|all]",
            "[thx|ty|merci|danke|cheers|much appreciated|I thank you|thank you so much|thank you, friend]",
        ),
        "You are welcome. [I am glad to help.|It was a pleasure.|Come back for another story.]",
    ),
    Talk(
        "bye",
        spelled_out(
            "[bye|goodbye|good night|see you|bye bye]",
            "see you [later|soon|tomorrow|then|next time]",
            "I [have to|must|need to] [go|leave|sleep|stop][| now]",
            "[that is|that's|this was] all[| for today| for now]",
            "[farewell|take care|until next time|exit|quit|stop|good bye|sleep well|I am leaving|talk to you later]",
            "[goodbye|bye|good night], [penstock|model|friend|take care|sleep well]",
        ),
        "[Goodbye|Farewell]! [Come back for another story.|Sleep well.|I hope that you liked the stories.]",
    ),
    Talk(
        "praise",
        spelled_out(
            "[nice story|I like it|you are great|good job|well done]",
            "I [like|love] [you|it|this|that|this story|that story|your story|your stories]",
            "[that|this|it] [is|was] [nice|lovely|great|good|beautiful|funny|wonderful|very nice|amazing]",
            "[what a|such a] [nice|lovely|great|beautiful|funny|wonderful] [story|poem|answer]",
            "you are [great|funny|smart|good|nice|kind|clever|awesome|wonderful]",
            "[wow|amazing|very good|cool|nice|great|awesome|haha|lol|perfect|good bot|wonderful|good answer|ha ha]",
        ),
        "[Thank you!|I am glad that you like it.|That is kind of you.] <suggestion>",
    ),
    Talk(
        "complaint",
        spelled_out(
            "[that was bad|I do not like it|that is wrong|that makes no sense|bad bot]",
            "I [do not|don't|did not] like [it|this|that|you|this story|that story|your story]",
            "[that|this|it] [is|was] [bad|boring|wrong|nonsense|terrible|not good|not right|stupid|silly]",
            "[what a|such a] [bad|boring|stupid|terrible] [story|poem|answer]",
            "you are [stupid|wrong|useless|boring|dumb|bad|silly|not very smart]",
            "[I hate this|terrible|not good|boring|wrong|no, that is wrong|nonsense|this makes no sense]",
        ),
        "[I am sorry.|I am sorry about that.] I am only a very small model. <suggestion>",
    ),
    Talk(
        "favourite",
        spelled_out(
            "[What|Which] is your [favourite|favorite] animal?",
            "[What|Which] animal do you [like|like best|like most|prefer|love]?",
            "[Do you have|Tell me|Name|And] your [favourite|favorite] animal[?|.]",
            "[Which|What] is the [best|nicest] animal?",
            "[Name|Pick|Choose|Tell me] an animal.",
            "[Do you like animals|What animals do you know|Which animals do you know|Do you know any animals]?",
        ),
        "I like [{some_hero.plural}|{some_hero.plural} best]. Shall I tell you a story about {some_hero.a}?",
    ),
    Talk(
        "like",
        spelled_out(
            "Do you [like|love|know] [{animal.plural}|the {animal}]?",
            "I [like|love|adore|really like] {animal.plural}[.|!| very much.]",
            "I [have|saw|own|met|want|found] {animal.a}[.| today.| at home.]",
            "Have you ever [seen|met] {animal.a}?",
            "What do you think [of|about] {animal.plural}?",
            "[My favourite animal|My pet] is [the|a] {animal}.",
            "[Are {animal.plural} nice?|{animal.Plural} are nice.|I am {animal.a}.]",
        ),
        "[I like {animal.plural}.|I like {animal.plural}, too.] Shall I tell you a story about {animal.a}?",
    ),
    Talk(
        "no",
        spelled_out(
            "[no|no thanks|nope|not now|no, thank you]",
            "[not really|nah|maybe later|never mind|forget it|rather not|not today|perhaps later|please don't|no way]",
            "I [do not|don't] want [a story|that|it|this|one|any more stories][|, thanks]",
            "[no|no more stories|no story][, thank you|, thanks|, please|, not now|, maybe later]",
        ),
        "[That is all right.|All right.] [Tell me when you want a story.|I am here when you need a story.]",
    ),
    Talk(
        "joke",
        spelled_out(
            "[Tell me|Do you know|Say|Give me|Can you tell me] [a joke|something funny|another joke][.|, please.]",
            "[Make me laugh.|joke|A joke please|Can you tell jokes?|Do you know jokes?|Another joke]",
            "I [want|would like] to [hear a joke|laugh|hear something funny].",
        ),
        "Why did {animal.a} sit on the clock? "
        "[Because it wanted to be on time.|Because it had too much time.|Because the clock was warm.]",
    ),
    Talk(
        "lonely",
        spelled_out(
            "I [am|feel|am so|feel so|am very] [sad|bored|lonely|tired|afraid|hungry|bad|unhappy|ill|alone|angry]",
            "I [had|have] a [bad|hard|terrible] [day|night|week]",
            "my day [was|is] [bad|terrible|hard]",
            "[I cannot sleep|cheer me up|nobody likes me|I need a friend|comfort me|I am not well|I miss my friends]",
        ),
        "I am sorry to hear that. [Perhaps a story helps.|A small story may help.] <suggestion>",
    ),
    Talk(
        "clock",
        spelled_out(
            "What [time|day|month|year|date] is it[| today| now]?",
            "What is the [time|date|weather][| today| now| outside| in Paris| in London]?",
            "What's the [time|date|weather|weather like][| today| now| outside| in Paris| in London]?",
            "[Will it|Is it going to] [rain|snow|be cold|be warm] [tomorrow|today|tonight|this week]?",
            "[How warm|How cold|How late|Is it cold|Is it warm|Is it raining] [is it|outside|now|today]?",
            "What day is [tomorrow|today]?",
        ),
        "I have no [clock and no window|window and no clock], so I do not know. <suggestion>",
    ),
    Talk(
        "no_story",
        spelled_out(
            "[Who found the {object}?|What happened next?|Where was the {object}?|And then?|Go on.]",
            "[Who|And who|Tell me who] [found|lost|had lost|got|discovered] [it|the {object}]?",
            "[Where|And where] was [it|the {object}]?",
            "What [was|is] the [name|title|moral|lesson] of the [story|{animal}]?",
            "[Continue.|Tell me more.|Keep going.|How does the story end?|Summarize the story.|What is the title?]",
            "[Who is|Who was|Tell me about] {hname}[?|.]",
        ),
        "I have not told you a story yet. <suggestion>",
    ),
)  # fmt: skip

_NUMBER_ANSWER = "I am not good with numbers. <suggestion>"
_CODE_ANSWER = "I cannot write programs. <suggestion>"
_UNKNOWN_ANSWER = (
    "[I only know small stories.|I do not know about that.|I am too small to know that."
    "|I am sorry, but I do not know that.|That is more than I know.] <suggestion>"
)
_UNKNOWN_WORD_ANSWER = "[I do not know that word.|I have never heard of that.|I do not know what that is.] <suggestion>"

_OFFER = "[| Shall I tell you a story about {thing.a}?| Would you like a story about {thing.a}?]"
_EXPLANATION = f"{{thing.definition}}[| {{thing.fact}}]{_OFFER}"
_ANIMAL_EXPLANATION = f"{{thing.definition}}[| {{thing.fact}}] {{thing.other}}{_OFFER}"
_TERM_EXPLANATION = "{term.definition}[| {term.fact}]"

EXPLANATION_WORDINGS = spelled_out(
    "[What is {thing.a}?|What are {thing.plural}?|Explain what {thing.a} is.|Tell me about {thing.plural}.]",
    "Explain {thing}.",
    "[What's|And what is|What exactly is] [{thing.a}|{thing}]?",
    "[Do you know|Tell me|I want to know|Please explain|Can you tell me] what [{thing.a} is|{thing.plural} are].",
    "[Can you |Could you |Please |][explain|describe|define] [{thing.a}|{thing.plural}|{thing}][.| to me.]",
    "[Tell me|Say|What can you tell me] [something|more|everything] about [{thing.plural}|{thing.the}|{thing.a}].",
    "[What does {thing} mean|What is meant by {thing}|What do you know about {thing.plural}]?",
    "[What is|Give me|Tell me|Do you know|Explain] the [meaning|definition] of [{thing}|{thing.a}].",
    "[Explain|Say|Describe] in [simple words|one sentence|a few words] what {thing.a} is.",
    "[How would you describe|How do you explain] [{thing.a}|{thing.plural}]?",
    "[Facts about|A definition of|Definition:|Meaning of|Information about] [{thing.plural}|{thing}]",
)

FACTS = (
    Talk(
        "eats",
        spelled_out(
            "What [does {animal.a}|do {animal.plural}|does the {animal}] eat?",
            "What [does {animal.a}|do {animal.plural}] [like to eat|have for dinner|feed on]?",
            "[What|Which] food [does {animal.a}|do {animal.plural}] [like|eat|need|want]?",
            "What is the [food|favourite food] of [{animal.a}|{animal.plural}]?",
            "What [can|should|do] I [feed|give] [{animal.a}|{animal.plural}][| to eat]?",
            "[Tell me|Do you know|Can you tell me] what [{animal.a} eats|{animal.plural} eat|{animal.plural} like].",
        ),
        "[{animal.A} eats|{animal.Plural} eat] {animal.food}.",
    ),
    Talk(
        "lives",
        spelled_out(
            "Where [does {animal.a}|do {animal.plural}|does the {animal}] [live|sleep|stay]?",
            "[Where|What] is the [home|house] of [{animal.a}|the {animal}]?",
            "Where [can I|do you|can we] [find|see|meet] [{animal.a}|{animal.plural}]?",
            "[Tell me|Do you know|Can you say] where [{animal.a} lives|{animal.plural} live|{animal.plural} sleep].",
            "In what place do {animal.plural} live?",
        ),
        "[{animal.A} lives|{animal.Plural} live] {animal.home}.",
    ),
    Talk(
        "works",
        spelled_out(
            "What [does {person.a}|do {person.plural}|does the {person}] do?",
            "What [does {person.a}|do {person.plural}] do [all day|for a living|at work|every day]?",
            "What is the [job|work|task|profession] of [{person.a}|the {person}]?",
            "[Tell me|Do you know|Can you tell me] what [{person.a} does|{person.plural} do].",
        ),
        "{person.definition}",
    ),
    Talk(
        "workplace",
        spelled_out(
            "Where [does {person.a}|do {person.plural}|does the {person}] work?",
            "[What|Where] is the [workplace|place of work] of [{person.a}|the {person}]?",
            "Where [can I|do you|can we] [find|meet|see] [{person.a}|{person.plural}]?",
            "[Tell me|Do you know|Can you tell me] where [{person.a} works|{person.plural} work].",
        ),
        "{person.A} works {person.workplace}.",
    ),
    Talk(
        "use",
        spelled_out(
            "What [is {object.a}|are {object.plural}] [for|good for|used for]?",
            "What [do|can] [people|I|you|we] do with [{object.a}|{object.plural}]?",
            "How [do|can] [people|I|you|we] use [{object.a}|{object.plural}]?",
            "Why [do|would|should] [people|I|you|we] [need|want|have|use] [{object.a}|{object.plural}]?",
            "What [do|would] [people|I|you|we] need [{object.a}|{object.plural}] for?",
            "What is the [use|purpose|point] of [{object.a}|{object.plural}]?",
        ),
        "People use {object.a} {object.use}.",
    ),
)  # fmt: skip

YES_WORDINGS = spelled_out(
    "[yes|yes please|sure|ok|please]",
    "[yes|sure|okay|yeah|yep|of course|alright|all right][|, please|, tell me|, do it|, go ahead|, why not]",
    "[please do|go ahead|I would like that|why not|with pleasure|that would be nice|tell me|I would love to]",
)

RULES = {
    "suggestion": _SUGGESTION,
    **{f"talk.{talk.name}": talk.answer for talk in TALKS},
    **{f"fact.{fact.name}": fact.answer for fact in FACTS},
    "talk.number": _NUMBER_ANSWER,
    "talk.code": _CODE_ANSWER,
    "talk.unknown": _UNKNOWN_ANSWER,
    "talk.unknown_word": _UNKNOWN_WORD_ANSWER,
    "talk.declined": "[<talk.unknown>|<talk.unknown_word>]",
    "explanation.plain": _EXPLANATION,
    "explanation.animal": _ANIMAL_EXPLANATION,
    "explanation": "[<explanation.plain>|<explanation.animal>]",
    "term": _TERM_EXPLANATION,
}
