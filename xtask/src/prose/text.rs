//! Paragraphs and sentences of Markdown and of comments.

use crate::source::{Kind, Source};

/// One paragraph, list item or table cell.
#[derive(Debug, PartialEq, Eq)]
pub struct Paragraph {
    /// Documentation or a plain comment. Markdown files are documentation.
    pub kind: Kind,
    /// Its lines, with their numbers in the file.
    lines: Vec<(usize, String)>,
}

/// One sentence.
#[derive(Debug, PartialEq, Eq)]
pub struct Sentence {
    /// Line in the file at which it begins, from 1.
    pub line: usize,
    /// Its text, with every code span replaced by a pair of backticks.
    pub text: String,
}

/// Paragraphs of a Markdown file. Headings, code blocks and HTML are left out.
pub fn of_markdown(text: &str) -> Vec<Paragraph> {
    let mut blocks = Blocks::new(Kind::Doc);
    for (idx, line) in text.lines().enumerate() {
        blocks.add(idx + 1, line);
    }
    blocks.finish()
}

/// Paragraphs of the comments of a source file.
pub fn of_source(text: &str) -> Vec<Paragraph> {
    let source = Source::new(text);
    let code: Vec<&str> = source.code.lines().collect();
    let is_alone = |line: usize| code.get(line - 1).is_none_or(|code| code.trim().is_empty());
    let mut paragraphs = Vec::new();
    let mut open: Option<(usize, Blocks)> = None;
    for comment in &source.comments {
        let continues = is_alone(comment.line)
            && open.as_ref().is_some_and(|(line, blocks)| {
                line + 1 == comment.line && blocks.kind == comment.kind && is_alone(*line)
            });
        if !continues && let Some((_, blocks)) = open.take() {
            paragraphs.extend(blocks.finish());
        }
        let (line, blocks) = open.get_or_insert_with(|| (0, Blocks::new(comment.kind)));
        *line = comment.line;
        blocks.add(comment.line, &comment.text);
    }
    paragraphs.extend(open.into_iter().flat_map(|(_, blocks)| blocks.finish()));
    paragraphs
}

/// Collects lines into paragraphs.
struct Blocks {
    kind: Kind,
    done: Vec<Paragraph>,
    lines: Vec<(usize, String)>,
    is_in_code: bool,
}

impl Blocks {
    fn new(kind: Kind) -> Self {
        Self { kind, done: Vec::new(), lines: Vec::new(), is_in_code: false }
    }

    fn add(&mut self, number: usize, line: &str) {
        let line = line.trim();
        if line.starts_with("```") || line.starts_with("~~~") {
            self.is_in_code = !self.is_in_code;
            self.close();
            return;
        }
        let is_skipped = line.is_empty()
            || line.starts_with("#")
            || line.starts_with('<')
            || (line.starts_with('[') && line.contains("]: "));
        if self.is_in_code || is_skipped {
            self.close();
        } else if line.starts_with('|') {
            self.close();
            for cell in line.trim_matches('|').split('|') {
                self.lines.push((number, cell.trim().to_owned()));
                self.close();
            }
        } else {
            let line = line.trim_start_matches("> ");
            let item = line_without_mark(line);
            if item.is_some() {
                self.close();
            }
            self.lines.push((number, item.unwrap_or(line).to_owned()));
        }
    }

    fn close(&mut self) {
        let lines = std::mem::take(&mut self.lines);
        if !lines.is_empty() {
            self.done.push(Paragraph { kind: self.kind, lines });
        }
    }

    fn finish(mut self) -> Vec<Paragraph> {
        self.close();
        self.done
    }
}

/// The text of a list item that begins here.
fn line_without_mark(line: &str) -> Option<&str> {
    let bullet = ["- ", "* ", "+ "].iter().find_map(|mark| line.strip_prefix(mark));
    bullet.or_else(|| {
        let (number, text) = line.split_once(". ")?;
        let is_number = !number.is_empty() && number.chars().all(|c| c.is_ascii_digit());
        is_number.then_some(text)
    })
}

impl Paragraph {
    /// The line at which it begins.
    pub fn line(&self) -> usize {
        self.lines[0].0
    }

    /// How many words it has. A code span is one word.
    pub fn num_words(&self) -> usize {
        self.sentences().iter().map(|sentence| num_words(&sentence.text)).sum()
    }

    /// Its sentences.
    pub fn sentences(&self) -> Vec<Sentence> {
        let mut sentences = Vec::new();
        let (mut text, mut start) = (String::new(), None);
        let mut close = |text: &mut String, start: &mut Option<usize>| {
            let whole = std::mem::take(text);
            if let Some(line) = start.take() {
                sentences.push(Sentence { line, text: whole.trim().to_owned() });
            }
        };
        let mut code_mark = 0;
        let mut is_over = false;
        for (line, part) in &self.lines {
            let mut rest = part.as_str();
            while let Some(c) = rest.chars().next() {
                if c == '`' {
                    let len = rest.chars().take_while(|c| *c == '`').count();
                    rest = &rest[len..];
                    if code_mark == len {
                        code_mark = 0;
                        text.push('`');
                    } else if code_mark == 0 {
                        if is_over {
                            close(&mut text, &mut start);
                            is_over = false;
                        }
                        code_mark = len;
                        start.get_or_insert(*line);
                        text.push('`');
                    }
                    continue;
                }
                rest = &rest[c.len_utf8()..];
                if code_mark > 0 {
                    continue;
                }
                if is_over && !c.is_whitespace() {
                    if !c.is_lowercase() {
                        close(&mut text, &mut start);
                    }
                    is_over = false;
                }
                if !c.is_whitespace() {
                    start.get_or_insert(*line);
                }
                text.push(c);
                let is_at_gap = rest.chars().next().is_none_or(|next| next.is_whitespace());
                if is_at_gap && ends_sentence(&text) {
                    is_over = true;
                }
            }
            if code_mark == 0 {
                text.push(' ');
            }
        }
        close(&mut text, &mut start);
        sentences
    }
}

fn ends_sentence(text: &str) -> bool {
    const ABBREVIATIONS: [&str; 4] = ["e.g.", "i.e.", "cf.", "vs."];
    let end = text.trim_end_matches(['"', '\'', ')', '*', '_', '”']);
    end.ends_with(['.', '!', '?']) && !ABBREVIATIONS.iter().any(|short| end.ends_with(short))
}

/// How many words a text has: what spaces separate and has a letter, a digit or a code span.
pub fn num_words(text: &str) -> usize {
    let is_word = |word: &&str| word.chars().any(|c| c.is_alphanumeric() || c == '`');
    text.split_whitespace().filter(is_word).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sentences(paragraphs: &[Paragraph]) -> Vec<(usize, String)> {
        let all = paragraphs.iter().flat_map(Paragraph::sentences);
        all.map(|sentence| (sentence.line, sentence.text)).collect()
    }

    fn owned<const N: usize>(rows: [(usize, &str); N]) -> Vec<(usize, String)> {
        rows.into_iter().map(|(line, text)| (line, text.to_owned())).collect()
    }

    #[test]
    fn markdown_is_cut_into_sentences() {
        let text = "# What it is\n\nOne two.\nThree `a. B` four! (Five.) Six e.g. Seven.\n\n- Item one\n  goes on.\n\
                    - Item two\n\n```sh\nWhat is code.\n```\n\n| Cell. | `x` y |\n|---|---|\n1. First\n";
        assert_eq!(
            sentences(&of_markdown(text)),
            owned([
                (3, "One two."),
                (4, "Three `` four!"),
                (4, "(Five.)"),
                (4, "Six e.g. Seven."),
                (6, "Item one goes on."),
                (8, "Item two"),
                (14, "Cell."),
                (14, "`` y"),
                (15, "---"),
                (15, "---"),
                (16, "First"),
            ])
        );
    }

    #[test]
    fn comments_are_joined_over_lines() {
        let text = "//! Crate\n//! docs. More.\n\n/// Doc.\n// Plain\n// goes on.\nlet a = 1; // Why a\nlet b = 1; // Why b\n";
        let paragraphs = of_source(text);
        let found = owned([
            (1, "Crate docs."),
            (2, "More."),
            (4, "Doc."),
            (5, "Plain goes on."),
            (7, "Why a"),
            (8, "Why b"),
        ]);
        assert_eq!(sentences(&paragraphs), found);
        let kinds: Vec<_> = paragraphs.iter().map(|paragraph| paragraph.kind).collect();
        assert_eq!(kinds, [Kind::Doc, Kind::Doc, Kind::Plain, Kind::Plain, Kind::Plain]);
    }

    #[test]
    fn words_are_counted() {
        assert_eq!(num_words("a `` b – c, 3.5 ms"), 6);
        let text = of_markdown("One `two three` four. Five");
        assert_eq!(text[0].num_words(), 4);
    }

    #[test]
    fn a_code_span_may_end_a_line_and_begin_a_sentence() {
        assert_eq!(
            sentences(&of_markdown("Calls `a\nb`. `c` returns")),
            owned([(1, "Calls ``."), (2, "`` returns")])
        );
    }
}
