//! Splits source text of Rust, C, C++ and CUDA into code and comments.

/// One file, taken apart.
pub struct Source {
    /// The text with comments and the contents of literals replaced by spaces. Lines and columns are kept.
    pub code: String,
    /// Comments in their order.
    pub comments: Vec<Comment>,
}

/// One line comment, or one line of a block comment.
#[derive(Debug, PartialEq, Eq)]
pub struct Comment {
    /// Line in the file, from 1.
    pub line: usize,
    /// Documentation or plain.
    pub kind: Kind,
    /// The text behind the marker.
    pub text: String,
}

/// Purpose of a comment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `///`, `//!`, `/** */` and `/*! */`.
    Doc,
    /// `//` and `/* */`.
    Plain,
}

impl Source {
    /// Takes `text` apart. Text that does not parse yields a wrong split, and no panic.
    pub fn new(text: &str) -> Self {
        let mut lexer = Lexer {
            text,
            bytes: text.as_bytes(),
            code: text.as_bytes().to_vec(),
            at: 0,
            line: 1,
            comments: Vec::new(),
        };
        lexer.run();
        let code = String::from_utf8_lossy(&lexer.code).into_owned();
        Self { code, comments: lexer.comments }
    }
}

struct Lexer<'a> {
    text: &'a str,
    bytes: &'a [u8],
    code: Vec<u8>,
    at: usize,
    line: usize,
    comments: Vec<Comment>,
}

impl Lexer<'_> {
    fn run(&mut self) {
        while let Some(&byte) = self.bytes.get(self.at) {
            let rest = &self.bytes[self.at..];
            match byte {
                b'/' if rest.starts_with(b"//") => self.line_comment(),
                b'/' if rest.starts_with(b"/*") => self.block_comment(),
                b'"' => self.string(0),
                b'r' if !self.is_inside_word() => match raw_hashes(&rest[1..]) {
                    Some(num_hashes) => {
                        self.at += 1 + num_hashes;
                        self.raw_string(num_hashes);
                    }
                    None => self.at += 1,
                },
                b'\'' => self.character(),
                b'\n' => {
                    self.line += 1;
                    self.at += 1;
                }
                _ => self.at += 1,
            }
        }
    }

    /// Whether the byte before belongs to the same identifier. The prefixes `b` and `c` of raw strings do not count.
    fn is_inside_word(&self) -> bool {
        let before = |back: usize| self.at.checked_sub(back).map(|at| self.bytes[at]);
        let is_word =
            |byte: Option<u8>| byte.is_some_and(|b| b == b'_' || b.is_ascii_alphanumeric());
        match before(1) {
            Some(b'b' | b'c') => is_word(before(2)),
            other => is_word(other),
        }
    }

    fn line_comment(&mut self) {
        let end = self.bytes[self.at..]
            .iter()
            .position(|&b| b == b'\n')
            .map_or(self.bytes.len(), |len| self.at + len);
        let body = &self.text[self.at..end];
        let is_doc =
            body.starts_with("//!") || (body.starts_with("///") && !body.starts_with("////"));
        let kind = if is_doc { Kind::Doc } else { Kind::Plain };
        let text = body.trim_start_matches('/').trim_start_matches('!');
        self.comments.push(Comment { line: self.line, kind, text: text.to_owned() });
        self.blank(end);
    }

    /// Rust nests them, C does not; text that tells the two apart does not occur.
    fn block_comment(&mut self) {
        let (mut depth, mut end) = (1, self.at + 2);
        while depth > 0 && end < self.bytes.len() {
            let rest = &self.bytes[end..];
            if rest.starts_with(b"*/") {
                depth -= 1;
                end += 2;
            } else if rest.starts_with(b"/*") {
                depth += 1;
                end += 2;
            } else {
                end += 1;
            }
        }
        let body = &self.text[self.at + 2..end];
        let kind = if body.starts_with(['*', '!']) { Kind::Doc } else { Kind::Plain };
        let body = body.strip_suffix("*/").unwrap_or(body);
        for (idx, text) in body.lines().enumerate() {
            let text = text.trim_start().trim_start_matches(['*', '!']).to_owned();
            self.comments.push(Comment { line: self.line + idx, kind, text });
        }
        self.blank(end);
    }

    /// A string with escapes that opens at `self.at + offset`.
    fn string(&mut self, offset: usize) {
        let mut end = self.at + offset + 1;
        while let Some(&byte) = self.bytes.get(end) {
            match byte {
                b'\\' => end += 2,
                b'"' => break,
                _ => end += 1,
            }
        }
        self.at += 1;
        self.blank(end.min(self.bytes.len()));
        self.at = (self.at + 1).min(self.bytes.len());
    }

    /// A raw string with `num_hashes` marks; `self.at` is its quotation mark.
    fn raw_string(&mut self, num_hashes: usize) {
        let close = [b"\"".as_slice(), &b"#".repeat(num_hashes)].concat();
        self.at += 1;
        let rest = &self.bytes[self.at..];
        let len = rest.windows(close.len()).position(|part| part == close).unwrap_or(rest.len());
        self.blank(self.at + len);
        self.at = (self.at + close.len()).min(self.bytes.len());
    }

    /// A character literal, or the mark of a lifetime or label.
    fn character(&mut self) {
        let rest = &self.text[self.at + 1..];
        let mut chars = rest.chars();
        let end = match chars.next() {
            Some('\\') => {
                // The escaped character may be a quotation mark itself.
                rest[1..].char_indices().skip(1).find(|(_, c)| *c == '\'').map(|(len, _)| len + 1)
            }
            Some(c) if chars.next() == Some('\'') => Some(c.len_utf8()),
            _ => None,
        };
        match end {
            Some(len) => {
                self.at += 1;
                self.blank(self.at + len);
                self.at += 1;
            }
            None => self.at += 1,
        }
    }

    /// Replaces everything up to `end` by spaces, except ends of lines, and goes there.
    fn blank(&mut self, end: usize) {
        for byte in &mut self.code[self.at..end] {
            if *byte == b'\n' {
                self.line += 1;
            } else {
                *byte = b' ';
            }
        }
        self.at = end;
    }
}

/// How many `#` stand between an `r` and a quotation mark. `None` where there is no such mark.
fn raw_hashes(rest: &[u8]) -> Option<usize> {
    let num_hashes = rest.iter().take_while(|&&b| b == b'#').count();
    (rest.get(num_hashes) == Some(&b'"')).then_some(num_hashes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(text: &str) -> String {
        Source::new(text).code
    }

    #[test]
    fn comments_have_their_line_and_kind() {
        let source =
            Source::new("//! Crate.\nfn a() {} // why\n/// Doc.\n//// rule\n/* one\n * two */ b");
        let found: Vec<_> =
            source.comments.iter().map(|c| (c.line, c.kind, c.text.trim())).collect();
        assert_eq!(
            found,
            [
                (1, Kind::Doc, "Crate."),
                (2, Kind::Plain, "why"),
                (3, Kind::Doc, "Doc."),
                (4, Kind::Plain, "rule"),
                (5, Kind::Plain, "one"),
                (6, Kind::Plain, "two"),
            ]
        );
        assert!(source.code.ends_with(" b") && source.code.lines().count() == 6);
    }

    #[test]
    fn literals_hide_what_looks_like_code() {
        assert_eq!(code(r#"a("// no", "\"//")"#), r#"a("     ", "    ")"#);
        assert_eq!(code(r##"a(br#"use "x""#, r"//")"##), r##"a(br#"       "#, r"  ")"##);
        assert_eq!(code("a('\"', '\\'', 'é') // c").trim_end(), "a(' ', '  ', '  ')");
        assert_eq!(code("fn f<'a>(x: &'a str) {}"), "fn f<'a>(x: &'a str) {}");
        assert_eq!(code("for x in \"a\nb\" {}"), "for x in \" \n \" {}");
    }

    #[test]
    fn a_text_that_ends_early_is_no_panic() {
        for text in ["\"open", "/* open", "r#\"open", "'", "'\\", "b'", "\"\\"] {
            Source::new(text);
        }
    }
}
