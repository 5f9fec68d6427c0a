//! From text to tokens and back, with streaming decode.

use std::path::{Path, PathBuf};

use thiserror::Error;

/// A Hugging Face `tokenizer.json`.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
}

/// Decodes token ids one by one; see [`Tokenizer::stream`].
///
/// [`push`](Self::push) and [`finish`](Self::finish) return pieces of the decoded text. No piece ends inside a UTF-8
/// character: the stream keeps the bytes of an unfinished character until later tokens complete it. `finish` returns
/// them as U+FFFD.
#[derive(Debug)]
pub struct TokenStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Recent tokens: the text of a token depends on its neighbours (leading spaces, byte runs).
    window: Vec<u32>,
    /// Bytes of the decoded window that have been returned, or belong to the context.
    emitted_bytes: usize,
    /// Leading tokens of the window that were returned before the last piece.
    settled: usize,
}

/// Failure of a tokenizer.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages explain the fields")]
pub enum TokenizerError {
    /// The file is missing or no tokenizer.
    #[error("cannot read the tokenizer {}: expected a Hugging Face tokenizer.json", path.display())]
    Open { path: PathBuf, source: tokenizers::Error },
    /// The text cannot be tokenised.
    #[error("cannot tokenise a text of {bytes} bytes")]
    Encode { bytes: usize, source: tokenizers::Error },
    /// The tokens cannot be decoded.
    #[error("cannot decode {tokens} tokens")]
    Decode { tokens: usize, source: tokenizers::Error },
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

    /// The text of `ids`, without special tokens. Bytes that are no UTF-8 become U+FFFD. Unknown ids are left out.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.inner
            .decode(ids, true)
            .map_err(|source| TokenizerError::Decode { tokens: ids.len(), source })
    }

    /// A stream for the tokens that follow `context`. The context is not returned; it only affects the text of the
    /// first tokens, for instance by a leading space.
    pub fn stream(&self, context: &[u32]) -> Result<TokenStream<'_>, TokenizerError> {
        let window = context[context.len().saturating_sub(CONTEXT_TOKENS)..].to_vec();
        let emitted_bytes = self.decode(&window)?.len();
        Ok(TokenStream { tokenizer: self, settled: window.len(), window, emitted_bytes })
    }
}

impl TokenStream<'_> {
    /// Adds token `id`. Returns the text that no later token can change: often one word, sometimes empty.
    pub fn push(&mut self, id: u32) -> Result<String, TokenizerError> {
        self.window.push(id);
        let text = self.tokenizer.decode(&self.window)?;
        // Decoders write U+FFFD for an incomplete character. A byte-fallback decoder writes one for every byte of the
        // run. The stream keeps all of them back.
        let stable = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
        let whole = stable.len() == text.len();
        let overlong = self.window.len() >= MAX_WINDOW_TOKENS;
        if !whole && !overlong {
            return Ok(self.emit(stable));
        }
        let piece = self.emit(&text);
        if overlong || !piece.is_empty() {
            // All text so far is returned. Tokens before the last settled point are removed; later ones stay as
            // context.
            let oldest = self.window.len().saturating_sub(CONTEXT_TOKENS);
            self.window.drain(..if overlong { oldest } else { self.settled });
            self.settled = self.window.len();
            self.emitted_bytes = self.tokenizer.decode(&self.window)?.len();
        }
        Ok(piece)
    }

    /// Returns the rest of the text, after the last token.
    pub fn finish(&mut self) -> Result<String, TokenizerError> {
        let text = self.tokenizer.decode(&self.window)?;
        Ok(self.emit(&text))
    }

    fn emit(&mut self, text: &str) -> String {
        if text.len() <= self.emitted_bytes {
            return String::new();
        }
        // Not a boundary if the decoder changed text that it had returned before.
        let start = text.ceil_char_boundary(self.emitted_bytes);
        self.emitted_bytes = text.len();
        text[start..].to_owned()
    }
}

/// Tokens of the prompt, or of broken output, that a stream keeps as context.
const CONTEXT_TOKENS: usize = 8;
/// Most tokens in a row that may end inside a character. Valid text has at most three. Beyond this limit the output
/// is broken, and the stream returns it as it is.
const MAX_WINDOW_TOKENS: usize = 256;
