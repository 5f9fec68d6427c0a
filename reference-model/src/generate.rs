//! Text generation: from a prompt to text, token by token.

use std::sync::Arc;
use std::time::{Duration, Instant};

use checkpoint::Checkpoint;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use thiserror::Error;

use crate::model::{ForwardError, KvCache, LoadError, LogitsOf, MoeObserver, Qwen3Moe};
use crate::tokenizer::{Tokenizer, TokenizerError};
use attention_client::ExpertBackend;

/// A language model that generates text: the attention side, its tokenizer, and a backend for the experts.
#[derive(Debug)]
pub struct Generator<B> {
    model: Qwen3Moe,
    tokenizer: Tokenizer,
    backend: B,
}

/// Options of a generation.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateOptions {
    /// Most tokens to generate. Clipped to the room in the context.
    pub max_new_tokens: usize,
    /// At 0 the likeliest token is taken. Above 0, tokens are drawn from `softmax(logits / temperature)`.
    pub temperature: f32,
    /// Seed of the draws. The same seed draws the same tokens from the same logits.
    pub seed: u64,
    /// Whether one of the model's end-of-text tokens ends the generation.
    pub stop_at_eos: bool,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self { max_new_tokens: 64, temperature: 0.0, seed: 0, stop_at_eos: true }
    }
}

/// A new token.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct TokenEvent<'a> {
    /// 0 for the first new token.
    pub idx: usize,
    /// The token.
    pub id: u32,
    /// Text that this token completes. Empty while a character is unfinished.
    pub text: &'a str,
    /// Time since the generation started.
    pub elapsed: Duration,
}

/// A finished generation.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Generation {
    /// Tokens of the prompt.
    pub prompt_ids: Vec<u32>,
    /// New tokens only, an end-of-text token included.
    pub token_ids: Vec<u32>,
    /// Text of the new tokens.
    pub text: String,
    /// Reason for the end.
    pub finish_reason: FinishReason,
    /// `max_new_tokens` as used. Below the requested number when the context leaves no more room.
    pub max_new_tokens: usize,
    /// Whether `max_new_tokens` was clipped to the context.
    pub clipped: bool,
    /// Times of the generation.
    pub timings: Timings,
}

/// Reason for the end of a generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FinishReason {
    /// The model wrote an end-of-text token.
    EndOfText,
    /// The requested number of tokens was reached.
    MaxNewTokens,
    /// The context is full, before the requested number of tokens was reached.
    ContextFull,
}

/// Times of a generation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Timings {
    /// Time for the prompt, up to its logits.
    pub prefill: Duration,
    /// Time of each later forward pass, over one token each. One pass fewer than new tokens.
    pub decode: Vec<Duration>,
}

impl Timings {
    /// Tokens per second after the prompt; `None` without such a pass.
    pub fn tokens_per_s(&self) -> Option<f64> {
        let seconds = self.decode.iter().sum::<Duration>().as_secs_f64();
        (seconds > 0.0).then(|| self.decode.len() as f64 / seconds)
    }
}

/// Failure of [`Generator::open`].
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenGeneratorError {
    /// The model cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The tokenizer cannot be read.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// Failure of a generation.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages explain the fields")]
pub enum GenerateError {
    /// The prompt has no tokens.
    #[error("the prompt is empty, expected at least one token")]
    EmptyPrompt,
    /// The context has no room for the prompt and a new token.
    #[error(
        "the prompt has {prompt_tokens} tokens, but the context of the model holds {context}, new tokens included: shorten the prompt"
    )]
    PromptTooLong { prompt_tokens: usize, context: usize },
    /// The temperature is negative or not a number.
    #[error("the temperature is {found}, expected 0 or a positive number")]
    Temperature { found: f32 },
    /// The tokenizer failed.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The model or its backend failed.
    #[error("after {generated} new tokens: {source}")]
    Forward { generated: usize, source: ForwardError },
    /// A logit is NaN or +inf, so no token can be chosen.
    #[error(
        "after {generated} new tokens: the logit of token {id} is {value}; the weights or the experts' outputs are broken"
    )]
    BadLogit { generated: usize, id: usize, value: f32 },
}

impl<B: ExpertBackend> Generator<B> {
    /// Loads the attention side and the tokenizer of `checkpoint`.
    pub fn open(checkpoint: &Arc<Checkpoint>, backend: B) -> Result<Self, OpenGeneratorError> {
        let tokenizer = Tokenizer::open(checkpoint.dir())?;
        Ok(Self::new(Qwen3Moe::load(checkpoint)?, tokenizer, backend))
    }

    /// A generator of these parts.
    pub fn new(model: Qwen3Moe, tokenizer: Tokenizer, backend: B) -> Self {
        Self { model, tokenizer, backend }
    }

    /// The model.
    pub fn model(&self) -> &Qwen3Moe {
        &self.model
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// The backend.
    pub fn backend_mut(&mut self) -> &mut B {
        &mut self.backend
    }

    /// Continues `prompt`. Calls `on_token` for every new token at once.
    ///
    /// # Errors
    /// [`GenerateError`]. Tokens that were reported before stay valid.
    pub fn generate(
        &mut self,
        prompt: &str,
        options: &GenerateOptions,
        on_token: &mut dyn FnMut(TokenEvent<'_>),
    ) -> Result<Generation, GenerateError> {
        self.generate_observed(prompt, options, on_token, None)
    }

    /// As [`generate`](Self::generate). `observer` sees every MoE block.
    pub fn generate_observed(
        &mut self,
        prompt: &str,
        options: &GenerateOptions,
        on_token: &mut dyn FnMut(TokenEvent<'_>),
        mut observer: Option<&mut dyn MoeObserver>,
    ) -> Result<Generation, GenerateError> {
        let started = Instant::now();
        let prompt_ids = self.tokenizer.encode(prompt)?;
        if prompt.is_empty() || prompt_ids.is_empty() {
            return Err(GenerateError::EmptyPrompt);
        }
        let max_new_tokens = self.room(prompt_ids.len(), options.max_new_tokens)?;
        let mut sampler = Sampler::new(options)?;
        let mut stream = self.tokenizer.stream(&prompt_ids)?;
        let clipped = max_new_tokens < options.max_new_tokens;
        let mut generation = Generation {
            prompt_ids,
            token_ids: Vec::with_capacity(max_new_tokens),
            text: String::new(),
            finish_reason: match clipped {
                true => FinishReason::ContextFull,
                false => FinishReason::MaxNewTokens,
            },
            max_new_tokens,
            clipped,
            timings: Timings::default(),
        };
        if max_new_tokens == 0 {
            return Ok(generation);
        }
        let mut pass = Pass {
            cache: self.model.new_cache(),
            model: &mut self.model,
            backend: &mut self.backend,
            generated: 0,
        };
        let mut logits = pass.run(&generation.prompt_ids, &mut observer)?;
        generation.timings.prefill = started.elapsed();
        loop {
            let idx = generation.token_ids.len();
            let id = sampler.choose(&logits, idx)?;
            generation.token_ids.push(id);
            let is_eos = pass.model.language().eos_ids.contains(&id);
            let ended = options.stop_at_eos && is_eos;
            let is_last = ended || idx + 1 == max_new_tokens;
            let mut text = stream.push(id)?;
            if is_last {
                text.push_str(&stream.finish()?);
            }
            generation.text.push_str(&text);
            on_token(TokenEvent { idx, id, text: &text, elapsed: started.elapsed() });
            if ended {
                generation.finish_reason = FinishReason::EndOfText;
            }
            if is_last {
                return Ok(generation);
            }
            let pass_started = Instant::now();
            pass.generated = idx + 1;
            logits = pass.run(&[id], &mut observer)?;
            generation.timings.decode.push(pass_started.elapsed());
        }
    }

    /// Number of new tokens, `wanted` at most, that fit into the context after the prompt.
    fn room(&self, prompt_tokens: usize, wanted: usize) -> Result<usize, GenerateError> {
        let context = self.model.language().max_positions;
        match context.checked_sub(prompt_tokens) {
            Some(room) if room > 0 || wanted == 0 => Ok(wanted.min(room)),
            _ => Err(GenerateError::PromptTooLong { prompt_tokens, context }),
        }
    }
}

/// Forward passes over one text.
struct Pass<'a> {
    model: &'a mut Qwen3Moe,
    backend: &'a mut dyn ExpertBackend,
    cache: KvCache,
    generated: usize,
}

impl Pass<'_> {
    /// The logits after the last of `tokens`. There must be at least one token.
    fn run(
        &mut self,
        tokens: &[u32],
        observer: &mut Option<&mut dyn MoeObserver>,
    ) -> Result<Vec<f32>, GenerateError> {
        let mut logits = Vec::new();
        for chunk in tokens.chunks(PREFILL_TOKENS) {
            let observer = observer.as_mut().map(|o| &mut **o as &mut dyn MoeObserver);
            logits = self
                .model
                .forward(chunk, &mut self.cache, LogitsOf::Last, self.backend, observer)
                .map_err(|source| GenerateError::Forward { generated: self.generated, source })?;
        }
        Ok(logits)
    }
}

/// Chooses tokens from logits.
struct Sampler {
    temperature: f64,
    rng: StdRng,
}

impl Sampler {
    fn new(options: &GenerateOptions) -> Result<Self, GenerateError> {
        let found = options.temperature;
        if !(found.is_finite() && found >= 0.0) {
            return Err(GenerateError::Temperature { found });
        }
        Ok(Self { temperature: f64::from(found), rng: StdRng::seed_from_u64(options.seed) })
    }

    /// Chooses a token by `logits` `[vocab]`. Among equally likely tokens the lowest id wins.
    fn choose(&mut self, logits: &[f32], generated: usize) -> Result<u32, GenerateError> {
        let mut best = 0;
        for (id, &value) in logits.iter().enumerate() {
            if value.is_nan() || value == f32::INFINITY {
                return Err(GenerateError::BadLogit { generated, id, value });
            }
            if value > logits[best] {
                best = id;
            }
        }
        if self.temperature == 0.0 {
            return Ok(best as u32);
        }
        let max = f64::from(logits[best]);
        let weight = |&l: &f32| ((f64::from(l) - max) / self.temperature).exp();
        let mut rest = self.rng.random::<f64>() * logits.iter().map(weight).sum::<f64>();
        for (id, logit) in logits.iter().enumerate() {
            rest -= weight(logit);
            if rest < 0.0 {
                return Ok(id as u32);
            }
        }
        // Reached only through rounding.
        Ok(best as u32)
    }
}

/// Tokens of a prompt in one forward pass. Bounds the memory of attention scores.
const PREFILL_TOKENS: usize = 512;

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(temperature: f32, seed: u64) -> Sampler {
        let options = GenerateOptions { temperature, seed, ..GenerateOptions::default() };
        Sampler::new(&options).unwrap()
    }

    #[test]
    fn the_lowest_of_equally_likely_tokens_wins() {
        let mut greedy = sampler(0.0, 0);
        assert_eq!(greedy.choose(&[0.5, 2.0, -1.0, 2.0], 0).unwrap(), 1);
        assert_eq!(greedy.choose(&[f32::NEG_INFINITY; 3], 0).unwrap(), 0);
    }

    #[test]
    fn draws_follow_the_softmax_at_the_temperature() {
        let (mut sampler, num) = (sampler(2.0, 11), 20_000);
        // At temperature 2 the odds are 1 : 2 : 4, and -inf is never drawn.
        let logits = [0.0, 2.0 * 2f32.ln(), 2.0 * 4f32.ln(), f32::NEG_INFINITY];
        let mut counts = [0u32; 4];
        for _ in 0..num {
            counts[sampler.choose(&logits, 0).unwrap() as usize] += 1;
        }
        for (count, expected) in counts.into_iter().zip([1.0, 2.0, 4.0, 0.0]) {
            let share = f64::from(count) / f64::from(num);
            assert!((share - expected / 7.0).abs() < 0.02, "{counts:?}");
        }
    }

    #[test]
    fn logits_that_are_no_numbers_are_named() {
        for value in [f32::NAN, f32::INFINITY] {
            let error = sampler(1.0, 0).choose(&[0.0, 1.0, value], 5).unwrap_err();
            assert!(matches!(error, GenerateError::BadLogit { generated: 5, id: 2, .. }));
        }
    }
}
