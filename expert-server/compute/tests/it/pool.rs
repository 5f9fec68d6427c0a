//! The compute pool against a naive f64 reference on random batches, and its refusals.
//!
//! `SWITCHYARD_TEST_SEED=N` replays a run; each failure prints its seed.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use switchyard_expert_compute::{
    Activation, ComputeError, ComputePool, ExpertArithmetic, ExpertBiases, ExpertGroup,
    ExpertWeights, Isa, LayerBatch, LayerExperts, Weight, WeightBytes, WeightError, WeightFormat,
    WeightScales, Weighting, gemm,
};

use crate::formats::{BF16, F16, F32, FORMATS, TestFormat, random_weight};

#[test]
fn agrees_with_f64_for_all_formats_and_shapes() {
    let seed = seed();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    for isa in available() {
        let mut pools: Vec<ComputePool> =
            [1, 2, 7].map(|threads| ComputePool::with_isa(threads, None, isa).unwrap()).into();
        for (hidden, inter) in SHAPES {
            for format in FORMATS {
                let num_experts = rng.random_range(1..9);
                let (hidden, inter) = format.round_up(hidden, inter);
                let layer = Layer::random(&mut rng, hidden, inter, num_experts, format);
                for num_tokens in [1, 2, 5, rng.random_range(6..40)] {
                    let batch = Batch::random(&mut rng, &layer, num_tokens);
                    let pool_idx = rng.random_range(0..pools.len());
                    let pool = &mut pools[pool_idx];
                    poison(pool, &layer);
                    let out = batch.run(pool, &layer);
                    let context = format!(
                        "{isa:?}, hidden {hidden}, inter {inter}, {format:?}, {num_tokens} tokens, \
                         {} threads",
                        pool.num_threads()
                    );
                    check(&batch.reference(&layer), &out, hidden, &context);
                }
            }
        }
    }
}

#[test]
fn many_tokens_per_expert_agree_with_f64() {
    let seed = seed();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    for isa in available() {
        let mut pool = ComputePool::with_isa(2, None, isa).unwrap();
        for format in FORMATS {
            // More than one block of summed columns, and a scale block that ends early.
            let layer = Layer::random(&mut rng, 1100, 70, 2, format);
            let batch = Batch::random(&mut rng, &layer, 83);
            let out = batch.run(&mut pool, &layer);
            check(&batch.reference(&layer), &out, 1100, &format!("{isa:?}, {format:?}"));
        }
    }
}

#[test]
fn batches_beyond_the_scratch_bound_run_in_rounds() {
    let seed = seed();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let layer = Layer::random(&mut rng, 4, 4096, 2, &BF16);
    // 64 MiB of activations are 4096 rows of 4096. This batch takes more, and splits an expert.
    let mut batch = Batch::random(&mut rng, &layer, 4500);
    batch.route(|token| vec![(1, token as f32 * 1e-3), (0, 0.5)]);
    let mut pool = ComputePool::new(2, None).unwrap();
    let out = batch.run(&mut pool, &layer);
    check(&batch.reference(&layer), &out, 4, "two rounds");
}

#[test]
fn the_result_does_not_depend_on_the_number_of_threads() {
    let seed = seed();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    for isa in available() {
        let layer = Layer::random(&mut rng, 300, 200, 6, &BF16);
        let batch = Batch::random(&mut rng, &layer, 33);
        let mut bits: Option<Vec<u32>> = None;
        for threads in [1, 2, 3, 8, 64] {
            let mut pool = ComputePool::with_isa(threads, None, isa).unwrap();
            for _ in 0..5 {
                let found = to_bits(&batch.run(&mut pool, &layer));
                let expected = bits.get_or_insert_with(|| found.clone());
                assert!(found == *expected, "{isa:?}, {threads} threads");
            }
        }
    }
}

#[test]
fn a_token_gets_the_same_bits_alone_and_in_a_batch() {
    let seed = seed();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    for isa in available().into_iter().filter(|&isa| isa != Isa::Portable) {
        for format in FORMATS {
            let layer = Layer::random(&mut rng, 1500, 90, 4, format);
            let batch = Batch::random(&mut rng, &layer, 50);
            let mut pool = ComputePool::with_isa(2, None, isa).unwrap();
            let together = batch.run(&mut pool, &layer);
            for token in [0, 7, 49] {
                let alone = batch.only(token).run(&mut pool, &layer);
                let expected = &together[token * 1500..(token + 1) * 1500];
                assert!(to_bits(&alone) == to_bits(expected), "{isa:?}, {format:?}, token {token}");
            }
        }
    }
}

#[test]
fn empty_batches_and_masked_tokens_give_zeros() {
    let mut rng = StdRng::seed_from_u64(1);
    let layer = Layer::random(&mut rng, 24, 16, 3, &F32);
    let mut pool = ComputePool::new(5, None).unwrap();
    let mut batch = Batch::random(&mut rng, &layer, 4);

    batch.route(|_| Vec::new());
    assert_eq!(batch.run(&mut pool, &layer), vec![0.0; 4 * 24]);

    // Groups without entries, including some for experts that are not loaded.
    batch.groups = (0..9).map(|expert| ExpertGroup { expert, begin: 0, end: 0 }).collect();
    assert_eq!(batch.run(&mut pool, &layer), vec![0.0; 4 * 24]);

    // One token of four has an entry.
    batch.route(|token| if token == 2 { vec![(1, 2.0)] } else { Vec::new() });
    let out = batch.run(&mut pool, &layer);
    check(&batch.reference(&layer), &out, 24, "one entry");
    assert!(out[..48].iter().chain(&out[72..]).all(|&value| value == 0.0));
    assert!(out[48..72].iter().any(|&value| value != 0.0));

    // No tokens at all.
    let none = Batch { x: Vec::new(), ..Batch::default() };
    assert_eq!(none.run(&mut pool, &layer), Vec::<f32>::new());
}

#[test]
fn a_token_may_visit_an_expert_twice_and_entries_between_groups_are_ignored() {
    let mut rng = StdRng::seed_from_u64(2);
    let layer = Layer::random(&mut rng, 40, 24, 3, &F16);
    let mut pool = ComputePool::new(2, None).unwrap();
    let mut batch = Batch::random(&mut rng, &layer, 2);
    batch.entry_token = vec![0, 0, 1, 1, 0];
    batch.entry_weight = vec![0.25, 0.5, f32::NAN, 1.0, -1.0];
    batch.groups = vec![
        ExpertGroup { expert: 0, begin: 0, end: 2 },
        ExpertGroup { expert: 2, begin: 3, end: 5 },
    ];
    let out = batch.run(&mut pool, &layer);
    check(&batch.reference(&layer), &out, 40, "twice");
}

#[test]
fn inconsistent_batches_are_refused() {
    let mut rng = StdRng::seed_from_u64(3);
    let layer = Layer::random(&mut rng, 8, 8, 4, &F32);
    let mut pool = ComputePool::new(2, None).unwrap();
    let mut good = Batch::random(&mut rng, &layer, 3);
    good.route(|_| vec![(1, 1.0), (2, 1.0)]);

    let refuse = |pool: &mut ComputePool, change: &dyn Fn(&mut Batch)| {
        let mut batch = good.clone();
        change(&mut batch);
        let mut out = vec![f32::NAN; batch.x.len()];
        let result = pool.run(&layer.experts, &batch.view(), &mut out, &mut || {});
        result.expect_err("the batch is inconsistent")
    };
    let error = refuse(&mut pool, &|batch| batch.x.truncate(23));
    assert_eq!(error, ComputeError::InputSize { found: 23, hidden: 8 });
    let error = refuse(&mut pool, &|batch| batch.entry_weight.truncate(5));
    assert_eq!(error, ComputeError::EntrySize { tokens: 6, weights: 5 });
    let error = refuse(&mut pool, &|batch| batch.entry_token[4] = 3);
    assert_eq!(error, ComputeError::TokenIndex { entry: 4, token: 3, num_tokens: 3 });
    let error = refuse(&mut pool, &|batch| batch.entry_token[4] = u32::MAX);
    assert_eq!(error, ComputeError::TokenIndex { entry: 4, token: u32::MAX, num_tokens: 3 });
    let error = refuse(&mut pool, &|batch| batch.groups.swap(0, 1));
    assert_eq!(error, ComputeError::GroupOrder { group: 1, expert: 1, previous: 2 });
    let error = refuse(&mut pool, &|batch| batch.groups[1].expert = 1);
    assert_eq!(error, ComputeError::GroupOrder { group: 1, expert: 1, previous: 1 });
    for (begin, end) in [(2, 6), (5, 4), (3, 7), (3, u32::MAX), (u32::MAX, u32::MAX)] {
        let error = refuse(&mut pool, &|batch| {
            batch.groups[1] = ExpertGroup { expert: 2, begin, end };
        });
        let expected = ComputeError::GroupRange { group: 1, begin, end, low: 3, num_entries: 6 };
        assert_eq!(error, expected);
    }
    for expert in [4, u32::MAX] {
        let error = refuse(&mut pool, &|batch| batch.groups[1].expert = expert);
        assert_eq!(error, ComputeError::NotLoaded { expert });
    }
    let mut out = vec![0.0; 25];
    let error = pool.run(&layer.experts, &good.view(), &mut out, &mut || {}).unwrap_err();
    assert_eq!(error, ComputeError::OutputSize { found: 25, expected: 24 });

    // The pool still works.
    check(&good.reference(&layer), &good.run(&mut pool, &layer), 8, "after errors");
}

#[test]
fn the_caller_is_ticked_during_work_and_may_panic_in_it() {
    let mut rng = StdRng::seed_from_u64(4);
    let layer = Layer::random(&mut rng, 512, 512, 4, &BF16);
    let batch = Batch::random(&mut rng, &layer, 64);
    for threads in [1, 3] {
        let mut pool = ComputePool::new(threads, None).unwrap();
        let mut out = vec![f32::NAN; batch.x.len()];
        let mut num_ticks = 0;
        pool.run(&layer.experts, &batch.view(), &mut out, &mut || num_ticks += 1).unwrap();
        // The calling thread ticks after each 2^24 of its multiplications. The other threads may do most of
        // the work.
        let work = batch.entry_token.len() * 3 * 512 * 512;
        let least = if threads == 1 { work >> 26 } else { 0 };
        assert!(num_ticks >= least, "{num_ticks} ticks, at least {least} expected");

        if threads == 1 {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(&layer.experts, &batch.view(), &mut out, &mut || panic!("on purpose"))
            }));
            assert!(result.is_err());
        }
        check(&batch.reference(&layer), &batch.run(&mut pool, &layer), 512, "after a panic");
    }
}

#[test]
fn experts_come_and_go_without_disturbing_a_holder_of_the_old_set() {
    let mut rng = StdRng::seed_from_u64(5);
    let layer = Layer::random(&mut rng, 16, 8, 3, &F32);
    let mut changed = layer.experts.clone();
    assert!(changed.remove(1).is_some());
    assert!(changed.remove(1).is_none() && changed.remove(77).is_none());
    assert_eq!(changed.ids().collect::<Vec<_>>(), [0, 2]);
    assert_eq!(layer.experts.ids().collect::<Vec<_>>(), [0, 1, 2]);
    let other = Layer::random(&mut rng, 8, 16, 1, &F32);
    let error = changed.insert(1, Arc::clone(other.experts.get(0).unwrap())).unwrap_err();
    assert!(matches!(error, WeightError::Shape { matrix: "gate", expert: 1, .. }), "{error}");
}

#[test]
fn every_arithmetic_agrees_with_f64() {
    let seed = seed();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let activations = [
        Activation::SILU,
        Activation::Swiglu { alpha: 1.0, limit: 0.7, offset: 0.0 },
        Activation::Swiglu { alpha: 1.702, limit: 0.5, offset: 1.0 },
        Activation::Gelu,
        Activation::GeluTanh,
        Activation::Relu,
        Activation::Relu2,
    ];
    for isa in available() {
        let mut pool = ComputePool::with_isa(2, None, isa).unwrap();
        for activation in activations {
            for weighting in [Weighting::Output, Weighting::Input] {
                for has_biases in [false, true] {
                    let arithmetic = ExpertArithmetic { activation, weighting };
                    let format = &FORMATS[rng.random_range(0..FORMATS.len())];
                    let layer = Layer::with_arithmetic(
                        &mut rng,
                        [90, 70],
                        3,
                        format,
                        arithmetic,
                        has_biases,
                    );
                    let batch = Batch::random(&mut rng, &layer, 19);
                    poison(&mut pool, &layer);
                    let out = batch.run(&mut pool, &layer);
                    let context =
                        format!("{isa:?}, {arithmetic:?}, biases {has_biases}, {format:?}");
                    check(&batch.reference(&layer), &out, 90, &context);
                }
            }
        }
    }
}

#[test]
fn products_over_widened_weights_agree_with_f64() {
    let seed = seed();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    for isa in available() {
        let mut pool = ComputePool::with_isa(2, None, isa).unwrap().with_products(gemm);
        for format in FORMATS {
            let layer = Layer::random(&mut rng, 1100, 70, 2, format);
            let batch = Batch::random(&mut rng, &layer, 11);
            let out = batch.run(&mut pool, &layer);
            check(&batch.reference(&layer), &out, 1100, &format!("{isa:?}, {format:?}"));
        }
    }
}

#[test]
fn weights_that_do_not_fit_their_shape_are_refused() {
    const FP8: WeightFormat = WeightFormat::F8E4m3 { block: [128, 128] };
    const INT4: WeightFormat = WeightFormat::Int4 { group: 4, has_minima: true };
    let bytes = || WeightBytes::from(vec![0u8; 24]);
    let new = |format, rows, cols, scales: Option<WeightScales>| {
        Weight::new(format, rows, cols, bytes(), scales).map(|_| ())
    };
    let ones = |num| Some(WeightScales::from(vec![1.0; num]));
    assert_eq!(new(WeightFormat::Bf16, 3, 4, None), Ok(()));
    assert_eq!(new(FP8, 6, 4, ones(1)), Ok(()));
    let size = |result| matches!(result, Err(WeightError::DataSize { found: 24, .. }));
    assert!(size(new(WeightFormat::F32, 3, 4, None)));
    assert!(size(new(WeightFormat::F32, usize::MAX, usize::MAX, None)));
    assert!(size(new(INT4, usize::MAX, usize::MAX - 1, None)));
    let scale = |result| matches!(result, Err(WeightError::ScaleSize { .. }));
    assert!(scale(new(FP8, 6, 4, None)));
    assert!(scale(new(FP8, 6, 4, ones(2))));
    assert!(scale(new(WeightFormat::F16, 3, 4, ones(1))));
    assert!(scale(new(WeightFormat::F8E4m3 { block: [0, 4] }, 6, 4, ones(1))));
    assert!(scale(new(INT4, 6, 8, ones(12))), "without minima");
    let minima = |value| {
        let mut minima = vec![0.5; 12];
        minima[7] = value;
        ones(12).map(|scales| WeightScales { minima: minima.into(), ..scales })
    };
    assert_eq!(new(INT4, 6, 8, minima(0.5)), Ok(()));
    let error = new(INT4, 6, 8, minima(f32::INFINITY)).unwrap_err();
    assert!(matches!(error, WeightError::ScaleNotFinite { idx: 7, .. }), "{error}");
    let error = new(FP8, 6, 4, Some(vec![f32::NAN].into())).unwrap_err();
    assert!(matches!(error, WeightError::ScaleNotFinite { idx: 0, .. }), "{error}");
    let error = new(INT4, 16, 3, minima(0.5)).unwrap_err();
    assert!(matches!(error, WeightError::OddRow { cols: 3, .. }), "{error}");
    for nan in [0x7f, 0xff] {
        let mut damaged = vec![0x7e; 24];
        damaged[17] = nan;
        let error = Weight::new(FP8, 6, 4, damaged.into(), ones(1)).unwrap_err();
        assert_eq!(error, WeightError::NotFinite { rows: 6, cols: 4, offset: 17 });
    }
    assert!(matches!(LayerExperts::new(0, 4), Err(WeightError::EmptyLayer { .. })));
}

#[test]
fn gates_and_biases_that_do_not_fit_the_arithmetic_are_refused() {
    let mut rng = StdRng::seed_from_u64(6);
    let arithmetic = ExpertArithmetic { activation: Activation::Relu2, ..ExpertArithmetic::SWIGLU };
    let ungated = Layer::with_arithmetic(&mut rng, [8, 4], 1, &F32, arithmetic, true);
    let gated = Layer::random(&mut rng, 8, 4, 1, &F32);
    let expert = |layer: &Layer| Arc::clone(layer.experts.get(0).unwrap());
    for (layer, other) in [(&ungated, &gated), (&gated, &ungated)] {
        let error = layer.experts.clone().insert(1, expert(other)).unwrap_err();
        assert!(matches!(error, WeightError::Gate { expert: 1, .. }), "{error}");
    }
    let mut weights = ExpertWeights::clone(&expert(&ungated));
    weights.biases.as_mut().unwrap().down.pop();
    let error = ungated.experts.clone().insert(1, Arc::new(weights)).unwrap_err();
    let expected = WeightError::Bias { matrix: "down", expert: 1, found: 7, expected: 8 };
    assert_eq!(error, expected);
}

/// Sizes around vector widths, scale blocks and blocks of summed columns.
const SHAPES: [(usize, usize); 9] =
    [(1, 1), (7, 5), (16, 16), (33, 65), (130, 129), (256, 128), (1025, 31), (31, 1030), (515, 67)];

fn seed() -> u64 {
    match std::env::var("SWITCHYARD_TEST_SEED") {
        Ok(seed) => seed.parse().expect("SWITCHYARD_TEST_SEED is a number"),
        Err(_) => rand::rng().random(),
    }
}

fn available() -> Vec<Isa> {
    let (available, missing): (Vec<_>, Vec<_>) =
        Isa::ALL.into_iter().partition(|isa| isa.is_available());
    for isa in missing {
        test_support::skip("vectors", &format!("this processor has no {isa:?}"));
    }
    available
}

fn to_bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// A random layer, with its weights also as f64.
struct Layer {
    experts: LayerExperts,
    /// gate, up, down.
    exact: Vec<[Vec<f64>; 3]>,
    hidden: usize,
    inter: usize,
}

impl Layer {
    fn random(
        rng: &mut StdRng,
        hidden: usize,
        inter: usize,
        num_experts: usize,
        format: &TestFormat,
    ) -> Self {
        let arithmetic = ExpertArithmetic::SWIGLU;
        Self::with_arithmetic(rng, [hidden, inter], num_experts, format, arithmetic, false)
    }

    fn with_arithmetic(
        rng: &mut StdRng,
        [hidden, inter]: [usize; 2],
        num_experts: usize,
        format: &TestFormat,
        arithmetic: ExpertArithmetic,
        has_biases: bool,
    ) -> Self {
        let mut experts = LayerExperts::new(hidden, inter).unwrap().with_arithmetic(arithmetic);
        let is_gated = arithmetic.activation.is_gated();
        let mut exact = Vec::new();
        for expert in 0..num_experts {
            let (gate, exact_gate) = random_weight(rng, inter, hidden, format);
            let (up, exact_up) = random_weight(rng, inter, hidden, format);
            let (down, exact_down) = random_weight(rng, hidden, inter, format);
            let mut bias = |len| (0..len).map(|_| rng.random_range(-0.5..0.5)).collect();
            let biases = has_biases.then(|| ExpertBiases {
                gate: bias(if is_gated { inter } else { 0 }),
                up: bias(inter),
                down: bias(hidden),
            });
            let weights = ExpertWeights { gate: is_gated.then_some(gate), up, down, biases };
            experts.insert(expert as u32, Arc::new(weights)).unwrap();
            exact.push([exact_gate, exact_up, exact_down]);
        }
        Self { experts, exact, hidden, inter }
    }
}

/// The activation in f64.
fn activate(activation: Activation, gate: f64, up: f64) -> f64 {
    let sigmoid = |v: f64| 1.0 / (1.0 + (-v).exp());
    match activation {
        Activation::Swiglu { alpha, limit, offset } => {
            let [alpha, limit, offset] = [alpha, limit, offset].map(f64::from);
            let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
            gate * sigmoid(alpha * gate) * (up + offset)
        }
        Activation::Gelu => gate * 0.5 * (1.0 + erf(gate / 2f64.sqrt())) * up,
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044715 * gate.powi(3));
            gate * 0.5 * (1.0 + inner.tanh()) * up
        }
        Activation::Relu => gate.max(0.0) * up,
        Activation::Relu2 => up.max(0.0).powi(2),
    }
}

/// By its Taylor series, which is exact enough up to 4.
fn erf(v: f64) -> f64 {
    if v.abs() > 4.0 {
        return v.signum();
    }
    let (mut term, mut sum) = (v, v);
    for n in 1..120 {
        let n = f64::from(n);
        term *= -v * v / n;
        sum += term / (2.0 * n + 1.0);
    }
    sum * 2.0 / std::f64::consts::PI.sqrt()
}

#[derive(Clone, Default)]
struct Batch {
    x: Vec<f32>,
    groups: Vec<ExpertGroup>,
    entry_token: Vec<u32>,
    entry_weight: Vec<f32>,
    num_tokens: usize,
}

impl Batch {
    /// Every token goes to a random subset of the experts.
    fn random(rng: &mut StdRng, layer: &Layer, num_tokens: usize) -> Self {
        let x = (0..num_tokens * layer.hidden).map(|_| rng.random_range(-2.0..2.0)).collect();
        let mut batch = Self { x, num_tokens, ..Self::default() };
        let num_experts = layer.exact.len();
        let chance = rng.random_range(0.2..1.0);
        batch.route(|_| {
            let mut entries = Vec::new();
            for expert in 0..num_experts {
                if rng.random_bool(chance) {
                    entries.push((expert as u32, rng.random_range(-1.0..1.0)));
                }
            }
            entries
        });
        batch
    }

    /// Sets the (expert, weight) entries of each token.
    fn route(&mut self, mut entries: impl FnMut(usize) -> Vec<(u32, f32)>) {
        let mut all: Vec<(u32, u32, f32)> = Vec::new();
        for token in 0..self.num_tokens {
            all.extend(entries(token).into_iter().map(|(e, weight)| (e, token as u32, weight)));
        }
        all.sort_by_key(|&(expert, token, _)| (expert, token));
        self.entry_token = all.iter().map(|entry| entry.1).collect();
        self.entry_weight = all.iter().map(|entry| entry.2).collect();
        self.groups.clear();
        for (idx, &(expert, ..)) in all.iter().enumerate() {
            let idx = idx as u32;
            match self.groups.last_mut() {
                Some(group) if group.expert == expert => group.end = idx + 1,
                _ => self.groups.push(ExpertGroup { expert, begin: idx, end: idx + 1 }),
            }
        }
    }

    /// The same routing for one token of the batch.
    fn only(&self, token: usize) -> Self {
        let hidden = self.x.len() / self.num_tokens;
        let mut entries = Vec::new();
        for group in &self.groups {
            for entry in group.begin as usize..group.end as usize {
                if self.entry_token[entry] as usize == token {
                    entries.push((group.expert, self.entry_weight[entry]));
                }
            }
        }
        let x = self.x[token * hidden..(token + 1) * hidden].to_vec();
        let mut batch = Self { x, num_tokens: 1, ..Self::default() };
        batch.route(|_| entries.clone());
        batch
    }

    fn view(&self) -> LayerBatch<'_> {
        LayerBatch {
            x: &self.x,
            groups: &self.groups,
            entry_token: &self.entry_token,
            entry_weight: &self.entry_weight,
        }
    }

    fn run(&self, pool: &mut ComputePool, layer: &Layer) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.x.len()];
        pool.run(&layer.experts, &self.view(), &mut out, &mut || {}).unwrap();
        out
    }

    fn reference(&self, layer: &Layer) -> Vec<f64> {
        let (hidden, inter) = (layer.hidden, layer.inter);
        let mut out = vec![0.0; self.x.len()];
        let ExpertArithmetic { activation, weighting } = layer.experts.arithmetic();
        for group in &self.groups {
            let Some(weights) = layer.experts.get(group.expert) else { continue };
            let biases = weights.biases.as_ref();
            let bias = |of: fn(&ExpertBiases) -> &Vec<f32>, row: usize| {
                biases.map_or(0.0, |biases| f64::from(of(biases)[row]))
            };
            for entry in group.begin as usize..group.end as usize {
                let [gate, up, down] = &layer.exact[group.expert as usize];
                let token = self.entry_token[entry] as usize;
                let factor = f64::from(self.entry_weight[entry]);
                let (before, after) = match weighting {
                    Weighting::Output => (1.0, factor),
                    Weighting::Input => (factor, 1.0),
                };
                let x: Vec<f64> = self.x[token * hidden..][..hidden]
                    .iter()
                    .map(|&v| f64::from(v) * before)
                    .collect();
                let dot =
                    |row: &[f64], v: &[f64]| row.iter().zip(v).map(|(a, b)| a * b).sum::<f64>();
                let h: Vec<f64> = (0..inter)
                    .map(|row| {
                        let range = row * hidden..(row + 1) * hidden;
                        let up = dot(&up[range.clone()], &x) + bias(|b| &b.up, row);
                        let gate = match activation.is_gated() {
                            true => dot(&gate[range], &x) + bias(|b| &b.gate, row),
                            false => 0.0,
                        };
                        activate(activation, gate, up)
                    })
                    .collect();
                for (row, out) in out[token * hidden..][..hidden].iter_mut().enumerate() {
                    let y = dot(&down[row * inter..(row + 1) * inter], &h);
                    *out += after * (y + bias(|b| &b.down, row));
                }
            }
        }
        out
    }
}

/// Leaves NaN in all scratch memory, which shows reads before writes in the result.
fn poison(pool: &mut ComputePool, layer: &Layer) {
    let mut batch = Batch { num_tokens: 40, ..Batch::default() };
    batch.x = vec![f32::NAN; 40 * layer.hidden];
    batch.route(|_| layer.experts.ids().map(|expert| (expert, 1.0)).collect());
    let out = batch.run(pool, layer);
    assert!(out.iter().all(|value| value.is_nan()));
}

/// Each row agrees to a few parts in a million of its largest value.
fn check(expected: &[f64], found: &[f32], hidden: usize, context: &str) {
    assert_eq!(expected.len(), found.len());
    for (token, (expected, found)) in expected.chunks(hidden).zip(found.chunks(hidden)).enumerate()
    {
        let scale = expected.iter().fold(0.0f64, |max, value| max.max(value.abs()));
        for (col, (expected, &found)) in expected.iter().zip(found).enumerate() {
            let error = (f64::from(found) - expected).abs();
            // A narrow row may cancel. Its terms are of the order of one.
            let bound = 1e-5 * scale.max(if hidden < 64 { 0.3 } else { 0.0 });
            assert!(
                error <= bound,
                "{context}: token {token}, column {col}: {found}, expected {expected}, row maximum {scale}"
            );
        }
    }
}
