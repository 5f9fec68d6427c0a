//! Text to tokens and back, with streaming decode.

use std::path::{Path, PathBuf};

use thiserror::Error;

/// A Hugging Face `tokenizer.json`.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
}

/// Turns token ids into text as they come; see [`Tokenizer::stream`].
///
/// The pieces that [`push`](Self::push) and [`finish`](Self::finish) return, put together, are
/// the decoded text. No piece ends inside a UTF-8 character: bytes of an unfinished character are
/// held back until the tokens that complete it arrive, or until `finish`, which shows them as
/// U+FFFD.
#[derive(Debug)]
pub struct TokenStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The tokens that still matter: decoders look at neighbours (leading spaces, byte runs).
    window: Vec<u32>,
    /// Bytes of the decoded window that have been returned, or belong to the context.
    emitted_bytes: usize,
    /// Leading tokens of the window that were returned before the last piece.
    settled: usize,
}

/// Failure to open a tokenizer or to use it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The file is missing or is no tokenizer.
    #[error("cannot read the tokenizer {}: expected a Hugging Face tokenizer.json", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        source: tokenizers::Error,
    },
    /// The text cannot be tokenised.
    #[error("cannot tokenise a text of {bytes} bytes")]
    Encode {
        /// Length of the text.
        bytes: usize,
        /// What went wrong.
        source: tokenizers::Error,
    },
    /// The tokens cannot be decoded.
    #[error("cannot decode {tokens} tokens")]
    Decode {
        /// Number of tokens.
        tokens: usize,
        /// What went wrong.
        source: tokenizers::Error,
    },
}

impl Tokenizer {
    /// Opens `path`, or `path/tokenizer.json` if `path` is a directory.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, TokenizerError> {
        let mut path = path.as_ref().to_path_buf();
        if path.is_dir() {
            path.push("tokenizer.json");
        }
        match tokenizers::Tokenizer::from_file(&path) {
            Ok(inner) => Ok(Self { inner }),
            Err(source) => Err(TokenizerError::Open { path, source }),
        }
    }

    /// The tokens of `text`, with the special tokens that the tokenizer's template adds.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.inner
            .encode_fast(text, true)
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|source| TokenizerError::Encode { bytes: text.len(), source })
    }

    /// The text of `ids`, without special tokens. Bytes that are no UTF-8 become U+FFFD, unknown
    /// ids nothing.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.inner
            .decode(ids, true)
            .map_err(|source| TokenizerError::Decode { tokens: ids.len(), source })
    }

    /// A stream for the tokens that follow `context`. The context is not returned again; it only
    /// decides how the first tokens read (a leading space, for instance).
    pub fn stream(&self, context: &[u32]) -> Result<TokenStream<'_>, TokenizerError> {
        let window = context[context.len().saturating_sub(CONTEXT_TOKENS)..].to_vec();
        let emitted_bytes = self.decode(&window)?.len();
        Ok(TokenStream { tokenizer: self, settled: window.len(), window, emitted_bytes })
    }
}

impl TokenStream<'_> {
    /// The text that `id` adds and that no later token can change; often one word, sometimes
    /// empty.
    pub fn push(&mut self, id: u32) -> Result<String, TokenizerError> {
        self.window.push(id);
        let text = self.tokenizer.decode(&self.window)?;
        // Decoders write U+FFFD for an incomplete character; a byte-fallback decoder writes one
        // for every byte of the run. All of them wait.
        let stable = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
        let whole = stable.len() == text.len();
        let overlong = self.window.len() >= MAX_WINDOW_TOKENS;
        if !whole && !overlong {
            return Ok(self.emit(stable));
        }
        let piece = self.emit(&text);
        if overlong || !piece.is_empty() {
            // Everything so far is out. The tokens before the last settled point can go, those
            // after it stay as context.
            let oldest = self.window.len().saturating_sub(CONTEXT_TOKENS);
            self.window.drain(..if overlong { oldest } else { self.settled });
            self.settled = self.window.len();
            self.emitted_bytes = self.tokenizer.decode(&self.window)?.len();
        }
        Ok(piece)
    }

    /// What is still held back, when no more tokens come.
    pub fn finish(&mut self) -> Result<String, TokenizerError> {
        let text = self.tokenizer.decode(&self.window)?;
        Ok(self.emit(&text))
    }

    fn emit(&mut self, text: &str) -> String {
        if text.len() <= self.emitted_bytes {
            return String::new();
        }
        // A boundary unless a decoder rewrote what it had given before.
        let start = text.ceil_char_boundary(self.emitted_bytes);
        self.emitted_bytes = text.len();
        text[start..].to_owned()
    }
}

/// Tokens of the prompt, or of broken output, that a stream keeps as context.
const CONTEXT_TOKENS: usize = 8;
/// Tokens that may pass without one of them ending a character. Text does that for three tokens at
/// most, broken output for as long as it likes; beyond this it is shown as it is.
const MAX_WINDOW_TOKENS: usize = 256;
