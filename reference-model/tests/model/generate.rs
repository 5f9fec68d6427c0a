//! Generation: options, limits, failures, streaming.

use std::error::Error;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use switchyard_reference_model::generate::FinishReason;
use switchyard_reference_model::model::ForwardError;
use switchyard_reference_model::{
    ExpertBackend, GenerateError, GenerateOptions, Generation, Generator, LocalExperts, Tokenizer,
};

use crate::common::{Failing, data, goldens, seed, tiny_moe};

fn generator() -> Generator<LocalExperts> {
    let checkpoint = tiny_moe();
    Generator::open(&checkpoint, LocalExperts::new(checkpoint.clone())).unwrap()
}

fn run<B: ExpertBackend>(
    generator: &mut Generator<B>,
    prompt: &str,
    options: &GenerateOptions,
) -> Result<Generation, GenerateError> {
    generator.generate(prompt, options, &mut |_| {})
}

fn tokens(max_new_tokens: usize) -> GenerateOptions {
    GenerateOptions { max_new_tokens, ..GenerateOptions::default() }
}

#[test]
fn a_prompt_must_exist_and_fit() {
    let mut generator = generator();
    let error = run(&mut generator, "", &tokens(4)).unwrap_err();
    assert!(matches!(error, GenerateError::EmptyPrompt), "{error}");
    // One token per line end.
    let prompt = "\nfn".repeat(1100);
    let prompt_tokens = generator.tokenizer().encode(&prompt).unwrap().len();
    let error = run(&mut generator, &prompt, &tokens(4)).unwrap_err().to_string();
    assert!(error.contains(&prompt_tokens.to_string()) && error.contains("1024"), "{error}");
}

#[test]
fn new_tokens_are_clipped_to_the_context_and_that_is_reported() {
    let mut generator = generator();
    let context = generator.model().language().max_positions;
    let mut prompt = "\nfn".repeat(context / 2);
    let length = |g: &Generator<_>, p: &str| g.tokenizer().encode(p).unwrap().len();
    while length(&generator, &prompt) > context - 3 {
        prompt.truncate(prompt.len() - 3);
    }
    let room = context - length(&generator, &prompt);
    let options = GenerateOptions { stop_at_eos: false, ..tokens(50) };
    let generation = run(&mut generator, &prompt, &options).unwrap();
    assert_eq!(generation.token_ids.len(), room);
    assert_eq!((generation.max_new_tokens, generation.clipped), (room, true));
    assert_eq!(generation.finish_reason, FinishReason::ContextFull);
    let generation = run(&mut generator, "fn", &tokens(3)).unwrap();
    assert_eq!((generation.max_new_tokens, generation.clipped), (3, false));
    assert_eq!(generation.finish_reason, FinishReason::MaxNewTokens);
    let generation = run(&mut generator, "fn", &tokens(0)).unwrap();
    assert!(generation.token_ids.is_empty() && generation.text.is_empty());
}

#[test]
fn a_long_prompt_runs_in_chunks_and_stays_the_same() {
    let mut generator = generator();
    let prompt = goldens().iter().map(|g| g.text_out.clone()).collect::<Vec<_>>().join("\n");
    let ids = generator.tokenizer().encode(&prompt).unwrap();
    assert!((513..1023).contains(&ids.len()), "{}", ids.len());
    let generation = run(&mut generator, &prompt, &tokens(1)).unwrap();
    let checkpoint = tiny_moe();
    let mut model = generator.model().clone();
    let mut cache = model.new_cache();
    let mut experts = LocalExperts::new(checkpoint);
    let last = switchyard_reference_model::LogitsOf::Last;
    let logits = model.forward(&ids, &mut cache, last, &mut experts, None).unwrap();
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
    assert_eq!(generation.token_ids, [best as u32]);
}

#[test]
fn a_backend_failure_names_the_layer_and_what_was_generated() {
    let checkpoint = tiny_moe();
    let num_layers = 4;
    let golden = &goldens()[3];
    // The prompt, two more passes, and three layers of the next.
    let experts = LocalExperts::new(checkpoint.clone());
    let backend = Failing { inner: experts, calls_left: 3 * num_layers + 3 };
    let mut generator = Generator::open(&checkpoint, backend).unwrap();
    let mut streamed = Vec::new();
    let error = generator
        .generate(&golden.text, &tokens(10), &mut |event| streamed.push(event.id))
        .unwrap_err();
    assert_eq!(streamed, golden.greedy[golden.ids.len()..][..3]);
    match &error {
        GenerateError::Forward { generated: 3, source: ForwardError::Backend(backend) } => {
            assert_eq!(backend.layer(), 3);
            assert_eq!(backend.source().unwrap().to_string(), "no live replica of expert 3");
        }
        other => panic!("{other:?}"),
    }
    let message = error.to_string();
    assert!(message.contains("3 new tokens") && message.contains("layer 3"), "{message}");
    // The next generation is not affected.
    generator.backend_mut().calls_left = usize::MAX;
    let generation = run(&mut generator, &golden.text, &tokens(10)).unwrap();
    assert_eq!(generation.token_ids, golden.greedy[golden.ids.len()..][..10]);
}

#[test]
fn draws_follow_the_seed_and_the_temperature() {
    let mut generator = generator();
    let draw = |temperature, seed| GenerateOptions { temperature, seed, ..tokens(24) };
    let mut ids = |options: &GenerateOptions| {
        run(&mut generator, "A vector allows you to store", options).unwrap().token_ids
    };
    let greedy = ids(&tokens(24));
    assert_eq!(ids(&draw(1.0, 7)), ids(&draw(1.0, 7)));
    assert_ne!(ids(&draw(1.5, 7)), ids(&draw(1.5, 8)));
    assert_eq!(ids(&draw(1e-4, 9)), greedy);
    for temperature in [-1.0, f32::NAN, f32::INFINITY] {
        let error = run(&mut self::generator(), "fn", &draw(temperature, 0)).unwrap_err();
        assert!(matches!(error, GenerateError::Temperature { .. }), "{error}");
    }
}

/// Overwrites the experts' output with NaN.
struct Broken;

impl ExpertBackend for Broken {
    fn forward(
        &mut self,
        _: u32,
        _: &[f32],
        _: &[i32],
        _: &[f32],
        out: &mut [f32],
    ) -> Result<(), switchyard_reference_model::BackendError> {
        out.fill(f32::NAN);
        Ok(())
    }
}

#[test]
fn broken_numbers_from_a_backend_are_an_error() {
    let mut generator = Generator::open(&tiny_moe(), Broken).unwrap();
    let error = run(&mut generator, "fn", &tokens(4)).unwrap_err().to_string();
    assert!(error.contains("layer 1") && error.contains("NaN"), "{error}");
}

#[test]
fn streamed_pieces_make_the_decoded_text() {
    let tokenizer = Tokenizer::open(data("tiny-moe")).unwrap();
    let mut rng = StdRng::seed_from_u64(seed());
    let text = "naïve façade — “quotes” 漢字かな交じり文 😀👩‍👩‍👧‍👦 עברית ₿ \u{fffd} end";
    let mut inputs = vec![tokenizer.encode(text).unwrap()];
    for _ in 0..300 {
        // Bytes at random, cut anywhere: many are no UTF-8.
        let len = rng.random_range(0..60);
        inputs.push((0..len).map(|_| rng.random_range(0..300)).collect());
        let chars: String = (0..30).map(|_| rng.random::<char>()).collect();
        inputs.push(tokenizer.encode(&chars).unwrap());
    }
    for (idx, ids) in inputs.iter().enumerate() {
        let mut stream = tokenizer.stream(&tokenizer.encode("The prompt").unwrap()).unwrap();
        let mut pieces: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
        pieces.push(stream.finish().unwrap());
        assert_eq!(pieces.concat(), tokenizer.decode(ids).unwrap(), "{ids:?}: {pieces:?}");
        if idx == 0 {
            assert_eq!(pieces.concat(), text);
        }
    }
}

#[test]
fn a_character_in_several_tokens_appears_once_whole() {
    let tokenizer = Tokenizer::open(data("tiny-moe")).unwrap();
    let ids = tokenizer.encode("😀x").unwrap();
    assert!(ids.len() >= 4, "the emoji is split: {ids:?}");
    let mut stream = tokenizer.stream(&[]).unwrap();
    let pieces: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    let shown: Vec<&str> = pieces.iter().map(String::as_str).filter(|p| !p.is_empty()).collect();
    assert_eq!(shown, ["😀", "x"]);
}

/// A tokenizer as Mixtral's: words with a leading "▁", any other character as byte tokens.
fn byte_fallback_tokenizer(dir: &std::path::Path) -> Tokenizer {
    let mut vocab: serde_json::Map<_, _> =
        (0..256).map(|b| (format!("<0x{b:02X}>"), serde_json::json!(b))).collect();
    for (id, token) in ["▁hello", "▁", "h", "x", "▁world"].iter().enumerate() {
        vocab.insert((*token).to_owned(), serde_json::json!(256 + id));
    }
    let json = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "fuse_unk": false,
            "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "byte_fallback": true, "ignore_merges": true, "vocab": vocab, "merges": []},
    });
    std::fs::write(dir.join("tokenizer.json"), json.to_string()).unwrap();
    Tokenizer::open(dir).unwrap()
}

#[test]
fn byte_fallback_and_leading_spaces_stream_as_they_decode() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = byte_fallback_tokenizer(dir.path());
    let mut rng = StdRng::seed_from_u64(seed());
    for _ in 0..200 {
        let mut ids = vec![256];
        let mut text = "hello".to_owned();
        for _ in 0..rng.random_range(1..20) {
            if rng.random() {
                ids.push(260);
                text.push_str(" world");
            } else {
                let c = ['é', '漢', '😀', 'z'][rng.random_range(0..4)];
                ids.extend(c.to_string().bytes().map(u32::from));
                text.push(c);
            }
        }
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
        let mut stream = tokenizer.stream(&ids[..1]).unwrap();
        let mut pieces: Vec<String> = ids[1..].iter().map(|&id| stream.push(id).unwrap()).collect();
        pieces.push(stream.finish().unwrap());
        assert_eq!(pieces.concat(), text["hello".len()..], "{ids:?}: {pieces:?}");
        assert!(!pieces.concat().contains('\u{fffd}'));
    }
}

#[test]
fn endless_broken_bytes_are_shown_and_memory_stays_bounded() {
    let tokenizer = Tokenizer::open(data("tiny-moe")).unwrap();
    let lead = tokenizer.encode("😀").unwrap()[0];
    let mut stream = tokenizer.stream(&[]).unwrap();
    let shown: usize = (0..2000).map(|_| stream.push(lead).unwrap().chars().count()).sum();
    assert!(shown > 1000, "{shown}");
    assert!(format!("{stream:?}").len() < 10_000_000);
    assert!(stream.push(lead).is_ok());
}

#[test]
fn a_missing_tokenizer_is_named() {
    let error = Tokenizer::open("/nonexistent/model").unwrap_err().to_string();
    assert!(error.contains("/nonexistent/model"), "{error}");
}
