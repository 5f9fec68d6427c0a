//! The modules that a file declares and the paths that it names, test code left out.

use crate::source::Source;

/// A file's declarations and paths.
#[derive(Debug, Default)]
pub struct Outline {
    /// Modules declared here.
    pub modules: Vec<Module>,
    /// Paths in `use` items.
    pub uses: Vec<Use>,
    /// Paths with `::` in other code.
    pub paths: Vec<Path>,
}

/// `mod name;` or `mod name { … }`.
#[derive(Debug, PartialEq, Eq)]
pub struct Module {
    /// Inline modules around it, outermost first.
    pub within: Vec<String>,
    /// Its name.
    pub name: String,
    /// Whether it is compiled for tests only.
    pub is_test: bool,
}

/// One path of a `use` item.
#[derive(Debug, PartialEq, Eq)]
pub struct Use {
    /// The path; `*` for a glob comes last.
    pub path: Path,
    /// The name that it brings into scope, or `*`.
    pub binding: String,
}

/// A path and its place.
#[derive(Debug, PartialEq, Eq)]
pub struct Path {
    /// Inline modules around it, outermost first.
    pub within: Vec<String>,
    /// Line in the file, from 1.
    pub line: usize,
    /// Its segments.
    pub segments: Vec<String>,
}

struct Token<'a> {
    line: usize,
    text: &'a str,
}

/// Reads `text`.
pub fn outline(text: &str) -> Outline {
    let source = Source::new(text);
    let mut reader = Reader {
        tokens: tokens(&source.code),
        at: 0,
        found: Outline::default(),
        within: Vec::new(),
    };
    reader.items(false);
    reader.found
}

fn tokens(code: &str) -> Vec<Token<'_>> {
    let bytes = code.as_bytes();
    let is_word = |b: u8| b == b'_' || b.is_ascii_alphanumeric() || b >= 0x80;
    let (mut tokens, mut at, mut line) = (Vec::new(), 0, 1);
    while at < bytes.len() {
        let byte = bytes[at];
        let len = if is_word(byte) {
            bytes[at..].iter().take_while(|&&b| is_word(b)).count()
        } else if bytes[at..].starts_with(b"::") {
            2
        } else {
            1
        };
        if byte == b'\n' {
            line += 1;
        } else if !byte.is_ascii_whitespace() {
            tokens.push(Token { line, text: &code[at..at + len] });
        }
        at += len;
    }
    tokens
}

struct Reader<'a> {
    tokens: Vec<Token<'a>>,
    at: usize,
    found: Outline,
    within: Vec<String>,
}

impl Reader<'_> {
    fn text(&self, ahead: usize) -> &str {
        self.tokens.get(self.at + ahead).map_or("", |token| token.text)
    }

    fn is_name(&self, ahead: usize) -> bool {
        self.text(ahead).starts_with(|c: char| c == '_' || c.is_alphabetic())
    }

    /// Reads up to the brace that closes the module, or to the end of the file. In a module for tests only
    /// declarations count.
    fn items(&mut self, is_test: bool) {
        let (mut depth, mut is_test_item) = (0_usize, false);
        while self.at < self.tokens.len() {
            match self.text(0) {
                "#" => {
                    if self.attribute() {
                        is_test_item = true;
                    }
                    continue;
                }
                "mod" if self.is_name(1) && matches!(self.text(2), "{" | ";") => {
                    let is_test = is_test || is_test_item;
                    is_test_item = false;
                    let (within, name) = (self.within.clone(), self.text(1).to_owned());
                    let is_inline = self.text(2) == "{";
                    self.found.modules.push(Module { within, name: name.clone(), is_test });
                    self.at += 3;
                    if is_inline {
                        self.within.push(name);
                        self.items(is_test);
                        self.within.pop();
                    }
                    continue;
                }
                // `pub` and `unsafe` before the word that follows an attribute.
                "pub" | "unsafe" | "(" if is_test_item => {
                    if self.text(0) == "(" {
                        self.skip_group();
                    } else {
                        self.at += 1;
                    }
                    continue;
                }
                _ if is_test_item => {
                    self.skip_item();
                    is_test_item = false;
                    continue;
                }
                "use" => {
                    self.at += 1;
                    self.use_tree(&mut Vec::new(), is_test);
                    continue;
                }
                "{" => depth += 1,
                "}" => match depth.checked_sub(1) {
                    Some(less) => depth = less,
                    None => {
                        self.at += 1;
                        return;
                    }
                },
                _ => {
                    if self.is_name(0) && self.text(1) == "::" && self.is_path_start() {
                        self.path(is_test);
                        continue;
                    }
                }
            }
            self.at += 1;
        }
    }

    /// Whether the name here is the first of its path. A `::` before it may begin a path, too.
    fn is_path_start(&self) -> bool {
        let before = |back: usize| self.at.checked_sub(back).map_or("", |at| self.tokens[at].text);
        let is_word = |text: &str| text.starts_with(|c: char| c == '_' || c.is_alphanumeric());
        match before(1) {
            "." => false,
            "::" => !is_word(before(2)) && before(2) != ">",
            _ => true,
        }
    }

    /// Passes an attribute. Returns true if it leaves the next item to tests.
    fn attribute(&mut self) -> bool {
        self.at += 1;
        if self.text(0) == "!" {
            self.at += 1;
        }
        let start = self.at;
        self.skip_group();
        let words = || self.tokens[start..self.at].iter().map(|token| token.text);
        words().nth(1) == Some("cfg")
            && words().any(|w| w == "test")
            && !words().any(|w| w == "not")
    }

    /// Passes a group in brackets that opens here.
    fn skip_group(&mut self) {
        let mut depth = 0_usize;
        while self.at < self.tokens.len() {
            match self.text(0) {
                "(" | "[" | "{" => depth += 1,
                ")" | "]" | "}" => depth = depth.saturating_sub(1),
                _ => {}
            }
            self.at += 1;
            if depth == 0 {
                return;
            }
        }
    }

    /// Passes an item, a field, a variant or a statement.
    fn skip_item(&mut self) {
        const ITEMS: [&str; 12] = [
            "fn",
            "struct",
            "enum",
            "impl",
            "trait",
            "use",
            "const",
            "static",
            "type",
            "macro_rules",
            "extern",
            "union",
        ];
        let is_item = ITEMS.contains(&self.text(0)) || self.text(0) == "async";
        while self.at < self.tokens.len() {
            match self.text(0) {
                "{" => {
                    self.skip_group();
                    // `use a::{…};`, a literal or a match that goes on.
                    if !matches!(self.text(0), ";" | "," | "." | "?") {
                        return;
                    }
                }
                "(" | "[" => self.skip_group(),
                ";" => {
                    self.at += 1;
                    return;
                }
                "," if !is_item => {
                    self.at += 1;
                    return;
                }
                "}" | ")" | "]" => return,
                _ => self.at += 1,
            }
        }
    }

    /// Reads a tree of `use` behind `prefix`, with what ends it.
    fn use_tree(&mut self, prefix: &mut Vec<String>, is_test: bool) {
        let num_before = prefix.len();
        let line = self.tokens.get(self.at).map_or(0, |token| token.line);
        loop {
            match self.text(0) {
                "{" => {
                    self.at += 1;
                    while self.at < self.tokens.len() && self.text(0) != "}" {
                        self.use_tree(prefix, is_test);
                        if self.text(0) == "," {
                            self.at += 1;
                        }
                    }
                    self.at += 1;
                    break;
                }
                "::" => self.at += 1,
                "*" => {
                    self.at += 1;
                    self.add_use(line, prefix, "*", is_test);
                    break;
                }
                _ if self.is_name(0) => {
                    let name = self.text(0).to_owned();
                    // `use a::{self}` names what stands before the braces.
                    if name != "self" || prefix.is_empty() {
                        prefix.push(name);
                    }
                    self.at += 1;
                    if self.text(0) == "::" {
                        continue;
                    }
                    let mut binding = prefix.last().cloned().unwrap_or_default();
                    if self.text(0) == "as" {
                        binding = self.text(1).to_owned();
                        self.at += 2;
                    }
                    self.add_use(line, prefix, &binding, is_test);
                    break;
                }
                _ => break,
            }
        }
        prefix.truncate(num_before);
        if num_before == 0 && self.text(0) == ";" {
            self.at += 1;
        }
    }

    fn add_use(&mut self, line: usize, segments: &[String], binding: &str, is_test: bool) {
        if !is_test {
            let path = Path { within: self.within.clone(), line, segments: segments.to_vec() };
            self.found.uses.push(Use { path, binding: binding.to_owned() });
        }
    }

    fn path(&mut self, is_test: bool) {
        let line = self.tokens[self.at].line;
        let mut segments = vec![self.text(0).to_owned()];
        self.at += 1;
        while self.text(0) == "::" && self.is_name(1) {
            segments.push(self.text(1).to_owned());
            self.at += 2;
        }
        if !is_test {
            self.found.paths.push(Path { within: self.within.clone(), line, segments });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uses(text: &str) -> Vec<String> {
        let found = outline(text).uses;
        found
            .iter()
            .map(|u| format!("{} {} {}", u.path.line, u.path.segments.join("::"), u.binding))
            .collect()
    }

    fn paths(text: &str) -> Vec<String> {
        outline(text)
            .paths
            .iter()
            .map(|p| format!("{} {}", p.line, p.segments.join("::")))
            .collect()
    }

    #[test]
    fn trees_of_use_are_unfolded() {
        assert_eq!(
            uses("use a::b;\npub(crate) use crate::{c::{self, D as E},\n  super::*};\nuse ::f;"),
            ["1 a::b b", "2 crate::c c", "2 crate::c::D E", "3 crate::super *", "4 f f"]
        );
    }

    #[test]
    fn paths_in_code_are_found() {
        assert_eq!(
            paths("fn a() -> b::C<d::E> {\n    crate::f::<u8>(x.g::<h::I>(), \"j::k\") // l::m\n}"),
            ["1 b::C", "1 d::E", "2 crate::f", "2 h::I"]
        );
    }

    #[test]
    fn code_for_tests_does_not_count() {
        let text = "#[cfg(test)]\nmod tests { use a::b; mod deep { use c::d; } }\n\
                    #[cfg(all(test, not_x))]\npub(crate) fn e() { f::g() }\n\
                    #[cfg(test)]\nuse h::{i};\nstruct J { #[cfg(test)] k: l::m, n: o::p }\n\
                    #[cfg(not(test))]\nuse q::r;\n#[test]\nfn s() {}";
        assert_eq!(uses(text), ["9 q::r r"]);
        assert_eq!(paths(text), ["7 o::p"]);
        let modules = outline(text).modules;
        assert!(modules.iter().all(|module| module.is_test) && modules.len() == 2);
    }

    #[test]
    fn inline_modules_are_noted() {
        let found = outline("mod a { mod b; use super::c; } use d::e; mod f;");
        assert_eq!(found.uses[0].path.within, ["a"]);
        assert!(found.uses[1].path.within.is_empty());
        let names: Vec<_> =
            found.modules.iter().map(|m| (m.within.len(), m.name.as_str())).collect();
        assert_eq!(names, [(0, "a"), (1, "b"), (0, "f")]);
    }
}
