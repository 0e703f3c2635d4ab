"""The form of a message's content that a chat template wants, parts or one text, found in its syntax tree.

Templates of models with media walk parts (`for part in message.content`), most others join the content to strings.
"""

from jinja2 import nodes

# Filters whose result has the same members, some of them or another order of them.
_KEEPING = frozenset({"list", "selectattr", "rejectattr", "select", "reject", "reverse", "sort", "unique"})
_MEMBERS = frozenset({"first", "last", "random"})  # filters that give one member
_JOINING = frozenset({"map", "join", "length", "count"})  # filters that see the members


def walks_parts(tree: nodes.Template) -> bool:
    """Return whether a template goes through the members of a message's content, or reads a part of it by its index."""
    return _Walk(tree).found


class _Walk:
    """Names that stand for the messages, for one of them and for its content, until no more are found."""

    def __init__(self, tree: nodes.Template) -> None:
        self._messages, self._message, self._content = {"messages"}, set[str](), set[str]()
        self._macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        known = -1
        while known != (known := len(self._messages) + len(self._message) + len(self._content)):
            for assign in tree.find_all(nodes.Assign):
                self._bind(assign.target, assign.node)
            for loop in tree.find_all(nodes.For):
                if self._is_messages(loop.iter) and (name := _name(loop.target)):
                    self._message.add(name)
            for call in tree.find_all(nodes.Call):
                self._bind_arguments(call)
        self.found = (
            any(self._is_content(_source(loop.iter)) for loop in tree.find_all(nodes.For))
            or any(self._is_content(_source(each)) for each in tree.find_all(nodes.Filter) if _sees_members(each))
            or any(self._is_part(each) for each in tree.find_all((nodes.Getattr, nodes.Getitem)))
        )

    def _bind(self, target: nodes.Node, value: nodes.Node | None) -> None:
        name = _name(target)
        if name is None or value is None:
            return
        if self._is_messages(value):
            self._messages.add(name)
        elif self._is_message(value):
            self._message.add(name)
        elif self._is_content(value):
            self._content.add(name)

    def _bind_arguments(self, call: nodes.Call) -> None:
        """Bind the parameters of a macro to what it is called with."""
        if not isinstance(call.node, nodes.Name) or (macro := self._macros.get(call.node.name)) is None:
            return
        for parameter, value in zip(macro.args, call.args, strict=False):
            self._bind(parameter, value)
        for keyword in call.kwargs:
            self._bind(nodes.Name(keyword.key, "param"), keyword.value)

    def _is_messages(self, node: nodes.Node | None) -> bool:
        match node:
            case nodes.Filter(name=name, node=inner) if name in _KEEPING:
                return self._is_messages(inner)
            case nodes.Getitem(node=inner, arg=nodes.Slice()):
                return self._is_messages(inner)
            case nodes.CondExpr(expr1=first, expr2=second):
                return self._is_messages(first) or self._is_messages(second)
            case _:
                return _name(node) in self._messages

    def _is_message(self, node: nodes.Node | None) -> bool:
        match node:
            case nodes.Filter(name=name, node=inner) if name in _MEMBERS:
                return self._is_messages(inner)
            case nodes.Getitem(node=inner, arg=arg) if not isinstance(arg, nodes.Slice):
                return self._is_messages(inner)
            case nodes.CondExpr(expr1=first, expr2=second):
                return self._is_message(first) or self._is_message(second)
            case _:
                return _name(node) in self._message

    def _is_content(self, node: nodes.Node | None) -> bool:
        match node:
            case (
                nodes.Getattr(node=inner, attr="content") | nodes.Getitem(node=inner, arg=nodes.Const(value="content"))
            ):
                return self._is_message(inner)
            case nodes.Call(node=nodes.Getattr(node=inner, attr="get"), args=[nodes.Const(value="content"), *_]):
                return self._is_message(inner)
            case nodes.CondExpr(expr1=first, expr2=second):
                return self._is_content(first) or self._is_content(second)
            case nodes.Or(left=left, right=right):
                return self._is_content(left) or self._is_content(right)
            case nodes.Filter(name="default" | "d", node=inner):
                return self._is_content(inner)
            case _:
                return _name(node) in self._content

    def _is_part(self, node: nodes.Node) -> bool:
        """`content[0].text` or `content[0]['type']`: a character of a text has neither."""
        match node:
            case nodes.Getattr(node=nodes.Getitem(node=inner, arg=nodes.Const(value=int())), attr="text" | "type"):
                return self._is_content(inner)
            case nodes.Getitem(
                node=nodes.Getitem(node=inner, arg=nodes.Const(value=int())), arg=nodes.Const(value="text" | "type")
            ):
                return self._is_content(inner)
            case _:
                return False


def _name(node: nodes.Node | None) -> str | None:
    """The name of a variable, or of an attribute of a namespace."""
    match node:
        case nodes.Name(name=name):
            return str(name)
        case nodes.NSRef(name=name, attr=attr) | nodes.Getattr(node=nodes.Name(name=name), attr=attr):
            return f"{name}.{attr}"
        case _:
            return None


def _source(node: nodes.Node | None) -> nodes.Node | None:
    """The expression that is gone through, without filters and slices that keep its members."""
    while True:
        match node:
            case nodes.Filter(name=name, node=inner) if name in _KEEPING or name in _JOINING or name in _MEMBERS:
                node = inner
            case nodes.Getitem(node=inner, arg=nodes.Slice()):
                node = inner
            case _:
                return node


def _sees_members(node: nodes.Filter) -> bool:
    """Return whether a filter reads attributes of members, as it makes sense for parts and not for characters."""
    return node.name in {"selectattr", "rejectattr"} or (
        node.name == "map" and any(keyword.key == "attribute" for keyword in node.kwargs)
    )
