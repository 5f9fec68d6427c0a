//! Times one expert by the engine's own kernels and by GEMM libraries, in turns.
//!
//!     cargo run --release --manifest-path bench/gemm/Cargo.toml -- [--threads N] [--pairs N] [--json]
//!
//! Each library is used in two ways. *In tiles* it replaces the engine's products. It gets weights that the engine's own
//! vector code has widened to f32, as it would in a server. *Whole* it multiplies whole matrices that are in memory as
//! f32 already. The second way needs 2 to 4 times the memory of the checkpoint, and leaves out silu and the weighted sum.
//! So it is a bound for any use of the library. It runs on one thread.
//!
//! A ratio is the library's time over the engine's time, of neighbouring runs. The program prints the median over the
//! pairs. Above 1 the engine's own kernels are faster.

mod experts;
mod libraries;

use std::error::Error;
use std::time::Instant;

use bench_harness::stats::{median, percentile};
use expert_compute::{
    ComputePool, ExpertGroup, Isa, LayerBatch, LayerExperts, WeightFormat,
};

use experts::{Floats, Random, make_experts};
use libraries::{LIBRARIES, Library};

/// One shape of expert.
pub struct Preset {
    pub name: &'static str,
    pub hidden: usize,
    pub inter: usize,
    pub format: WeightFormat,
    /// Experts in memory, too many for the caches.
    pub num_loaded: usize,
}

const PRESETS: [Preset; 2] = [
    Preset {
        name: "qwen3-30b-a3b",
        hidden: 2048,
        inter: 768,
        format: WeightFormat::Bf16,
        num_loaded: 24,
    },
    Preset {
        name: "deepseek-v3",
        hidden: 7168,
        inter: 2048,
        format: WeightFormat::F8E4m3 { block: [128, 128] },
        num_loaded: 6,
    },
];
const TOKENS: [usize; 5] = [1, 4, 16, 64, 256];

struct Options {
    json: bool,
    num_threads: usize,
    num_pairs: usize,
}

struct Row {
    preset: &'static str,
    tokens: usize,
    library: &'static str,
    way: &'static str,
    own_us: f64,
    library_us: f64,
    ratio: f64,
    ratio_p10: f64,
    ratio_p90: f64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = options()?;
    let mut rows = Vec::new();
    if !options.json {
        println!(
            "{} threads, {:?}, {} pairs",
            options.num_threads,
            Isa::detect(),
            options.num_pairs
        );
        println!(
            "{:<14} {:>6} {:<15} {:<6} {:>10} {:>10} {:>6} {:>13}",
            "preset", "tokens", "library", "way", "ours us", "its us", "ratio", "p10..p90"
        );
    }
    for preset in &PRESETS {
        let experts = make_experts(preset)?;
        for tokens in TOKENS {
            for library in &LIBRARIES {
                let row = in_tiles(preset, &experts, tokens, library, &options)?;
                rows.push(row.show(&options));
            }
        }
        if options.num_threads == 1 {
            let floats = Floats::new(preset);
            for tokens in TOKENS {
                for library in &LIBRARIES {
                    let row = whole(preset, &experts, &floats, tokens, library, &options)?;
                    rows.push(row.show(&options));
                }
            }
        }
    }
    if options.json {
        println!(
            "{{\"num_threads\":{},\"isa\":\"{:?}\",\"pairs\":{},\"rows\":[{}]}}",
            options.num_threads,
            Isa::detect(),
            options.num_pairs,
            rows.join(",")
        );
    }
    Ok(())
}

fn options() -> Result<Options, Box<dyn Error>> {
    let mut options = Options { json: false, num_threads: 1, num_pairs: 15 };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value"));
        match arg.as_str() {
            "--json" => options.json = true,
            "--threads" => options.num_threads = value()?.parse()?,
            "--pairs" => options.num_pairs = value()?.parse()?,
            _ => {
                let expected = "--json, --threads N or --pairs N";
                return Err(format!("unknown argument {arg}; expected {expected}").into());
            }
        }
    }
    Ok(options)
}

/// Measures the library in place of the engine's products.
fn in_tiles(
    preset: &Preset,
    experts: &LayerExperts,
    tokens: usize,
    library: &Library,
    options: &Options,
) -> Result<Row, Box<dyn Error>> {
    let mut own = Engine::new(preset, tokens, ComputePool::new(options.num_threads, None)?);
    let pool = ComputePool::new(options.num_threads, None)?.with_products(library.products);
    let mut its = Engine::new(preset, tokens, pool);
    let times =
        pairs(options, |expert| own.run(experts, expert), |expert| its.run(experts, expert))?;
    // Both results for expert 0 must agree.
    own.run(experts, 0)?;
    its.run(experts, 0)?;
    let scale = own.out.iter().fold(0f32, |max, v| max.max(v.abs()));
    let worst = own.out.iter().zip(&its.out).fold(0f32, |max, (a, b)| max.max((a - b).abs()));
    if !(worst <= 1e-4 * scale) {
        return Err(format!("{}: differs by {worst} of {scale}", library.name).into());
    }
    Ok(Row::new(preset, tokens, library, "tiles", times))
}

/// Measures the library's three products of whole f32 matrices beside the whole expert by the engine.
fn whole(
    preset: &Preset,
    experts: &LayerExperts,
    floats: &Floats,
    tokens: usize,
    library: &Library,
    options: &Options,
) -> Result<Row, Box<dyn Error>> {
    let (hidden, inter) = (preset.hidden, preset.inter);
    let mut own = Engine::new(preset, tokens, ComputePool::new(1, None)?);
    let x = own.x.clone();
    let (mut gate, mut up) = (vec![0.0; tokens * inter], vec![0.0; tokens * inter]);
    let mut out = vec![0.0; tokens * hidden];
    let times = pairs(
        options,
        |expert| own.run(experts, expert),
        |expert| {
            let [gate_weights, up_weights, down_weights] = floats.expert(expert);
            (library.products)(gate_weights, &x, hidden, &mut gate);
            (library.products)(up_weights, &x, hidden, &mut up);
            (library.products)(down_weights, &gate, inter, &mut out);
            std::hint::black_box(&out);
            Ok(())
        },
    )?;
    Ok(Row::new(preset, tokens, library, "whole", times))
}

/// Computes one expert at a time on a pool.
struct Engine {
    pool: ComputePool,
    x: Vec<f32>,
    entry_token: Vec<u32>,
    entry_weight: Vec<f32>,
    out: Vec<f32>,
    num_loaded: usize,
}

impl Engine {
    fn new(preset: &Preset, tokens: usize, pool: ComputePool) -> Self {
        let mut random = Random(7);
        let x = (0..tokens * preset.hidden).map(|_| random.float()).collect();
        Self {
            pool,
            x,
            entry_token: (0..tokens as u32).collect(),
            entry_weight: vec![0.5; tokens],
            out: vec![f32::NAN; tokens * preset.hidden],
            num_loaded: preset.num_loaded,
        }
    }

    fn run(&mut self, experts: &LayerExperts, expert: usize) -> Result<(), Box<dyn Error>> {
        let expert = (expert % self.num_loaded) as u32;
        let groups = [ExpertGroup { expert, begin: 0, end: self.entry_token.len() as u32 }];
        let batch = LayerBatch {
            x: &self.x,
            groups: &groups,
            entry_token: &self.entry_token,
            entry_weight: &self.entry_weight,
        };
        Ok(self.pool.run(experts, &batch, &mut self.out, &mut || {})?)
    }
}

/// Measures both in turns, in seconds per expert. Each run uses experts that have left the caches.
fn pairs(
    options: &Options,
    mut own: impl FnMut(usize) -> Result<(), Box<dyn Error>>,
    mut its: impl FnMut(usize) -> Result<(), Box<dyn Error>>,
) -> Result<Vec<(f64, f64)>, Box<dyn Error>> {
    let mut times = Vec::new();
    let mut expert = 0;
    // A run is long enough for the clock, and short enough that neighbouring runs see the same machine.
    let begin = Instant::now();
    own(0)?;
    its(0)?;
    let per_run = (0.005 / begin.elapsed().as_secs_f64()).ceil().clamp(1.0, 16.0) as usize;
    while times.len() < options.num_pairs {
        let mut timed = |run: &mut dyn FnMut(usize) -> Result<(), Box<dyn Error>>| {
            let begin = Instant::now();
            for _ in 0..per_run {
                run(expert)?;
                expert += 1;
            }
            Ok::<_, Box<dyn Error>>(begin.elapsed().as_secs_f64() / per_run as f64)
        };
        times.push((timed(&mut own)?, timed(&mut its)?));
    }
    Ok(times)
}

impl Row {
    fn new(
        preset: &Preset,
        tokens: usize,
        library: &Library,
        way: &'static str,
        times: Vec<(f64, f64)>,
    ) -> Self {
        let mut own: Vec<f64> = times.iter().map(|(own, _)| own * 1e6).collect();
        let mut its: Vec<f64> = times.iter().map(|(_, its)| its * 1e6).collect();
        let mut ratios: Vec<f64> = times.iter().map(|(own, its)| its / own).collect();
        Self {
            preset: preset.name,
            tokens,
            library: library.name,
            way,
            own_us: median(&mut own),
            library_us: median(&mut its),
            ratio: median(&mut ratios),
            ratio_p10: percentile(&mut ratios, 0.1),
            ratio_p90: percentile(&mut ratios, 0.9),
        }
    }

    /// Prints the row unless the output is JSON. Returns the row as JSON.
    fn show(&self, options: &Options) -> String {
        let Self { preset, tokens, library, way, own_us, library_us, .. } = self;
        let (ratio, p10, p90) = (self.ratio, self.ratio_p10, self.ratio_p90);
        if !options.json {
            println!(
                "{preset:<14} {tokens:>6} {library:<15} {way:<6} {own_us:>10.1} {library_us:>10.1} \
                 {ratio:>6.2} {p10:>6.2}..{p90:.2}"
            );
        }
        format!(
            "{{\"preset\":\"{preset}\",\"tokens\":{tokens},\"library\":\"{library}\",\
             \"way\":\"{way}\",\"own_us_p50\":{own_us:.1},\"library_us_p50\":{library_us:.1},\
             \"library_over_own_p50\":{ratio:.3},\"library_over_own_p10\":{p10:.3},\
             \"library_over_own_p90\":{p90:.3}}}"
        )
    }
}
