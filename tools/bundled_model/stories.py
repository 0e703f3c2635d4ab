"""The stories and poems that the bundled model tells, and the questions about a story with their right answers."""

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
    "|{hname} the {hero} and {fname} the {friend}|{fname} the {friend} and {hname} the {hero}"
    "|the {hero} called {hname} and the {friend} called {fname}"
    "|the {friend} called {fname} and the {hero} called {hname}]"
)

_ENDING = (
    "[[From that day on|After that], <both> were [good friends|the best of friends]."
    "|They [went|walked] home together, and both of them were happy."
    "|Until the stars came out, <both> sat together and [told stories|laughed|sang songs]."
    "|{hname} never forgot that {weather.adj} day."
    "|It had been a good day for <both>."
    "|In the end <both> were [happy|glad].]"
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
