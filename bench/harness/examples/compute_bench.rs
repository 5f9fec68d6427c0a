//! Measures the computation of experts on a processor beside the limits of the machine.
//!
//! For each preset and number of tokens per expert it reports the time per batch. It also reports weight bytes per
//! second and operations per second, and their fractions of the read bandwidth and of the GEMM rate. Weights are
//! synthetic and larger than the last cache. Each batch uses other experts than the batch before, as layers do. Run it with
//! `--release`.
//!
//! The read bandwidth is measured before and after each run of batches, since it changes within seconds on a shared
//! host. A fraction of it is the median over the runs. For one run it is the bytes per second over the mean of the two
//! neighbouring bandwidths.

use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use expert_server::compute::{
    BandwidthProbe, ComputePool, DType, ExpertGroup, ExpertWeights, Isa, LayerBatch, LayerExperts,
    Weight, WeightBytes, WeightFormat, WeightScales, gemm_rate,
};
use memmap2::{Advice, MmapMut};
use switchyard_bench_harness::stats::{median, percentile};

struct Preset {
    name: &'static str,
    hidden: usize,
    inter: usize,
    format: WeightFormat,
    /// Type of the scales, if the format has any.
    scales: DType,
    /// Experts of a batch.
    num_active: usize,
    /// Experts in memory: a subset if the host has no room for all.
    num_loaded: usize,
}

const FP8: WeightFormat = WeightFormat::F8E4m3 { block: [128, 128] };

const PRESETS: [Preset; 9] = [
    Preset {
        name: "cached",
        hidden: 7168,
        inter: 256,
        format: FP8,
        scales: DType::F32,
        num_active: 1,
        num_loaded: 1,
    },
    Preset {
        name: "qwen3-30b-a3b",
        hidden: 2048,
        inter: 768,
        format: WeightFormat::Bf16,
        scales: DType::F32,
        num_active: 8,
        num_loaded: 128,
    },
    Preset {
        name: "mixtral-8x7b",
        hidden: 4096,
        inter: 14336,
        format: WeightFormat::Bf16,
        scales: DType::F32,
        num_active: 2,
        num_loaded: 6,
    },
    Preset {
        name: "deepseek-v3",
        hidden: 7168,
        inter: 2048,
        format: FP8,
        scales: DType::F32,
        num_active: 8,
        num_loaded: 32,
    },
    Preset {
        name: "qwen3-30b-a3b-f32",
        hidden: 2048,
        inter: 768,
        format: WeightFormat::F32,
        scales: DType::F32,
        num_active: 8,
        num_loaded: 64,
    },
    Preset {
        name: "qwen3-30b-a3b-fp8",
        hidden: 2048,
        inter: 768,
        format: FP8,
        scales: DType::F32,
        num_active: 8,
        num_loaded: 128,
    },
    Preset {
        name: "qwen3-30b-a3b-int8",
        hidden: 2048,
        inter: 768,
        format: WeightFormat::Int8 { group: 128, has_minima: false },
        scales: DType::Bf16,
        num_active: 8,
        num_loaded: 128,
    },
    Preset {
        name: "qwen3-30b-a3b-int4",
        hidden: 2048,
        inter: 768,
        format: WeightFormat::Int4 { group: 32, has_minima: false },
        scales: DType::Bf16,
        num_active: 8,
        num_loaded: 128,
    },
    Preset {
        name: "qwen3-30b-a3b-mxfp4",
        hidden: 2048,
        inter: 768,
        format: WeightFormat::Fp4 { group: 32 },
        scales: DType::F8E8m0,
        num_active: 8,
        num_loaded: 128,
    },
];

const TOKENS: [usize; 7] = [1, 2, 4, 8, 16, 64, 256];

struct Options {
    json: bool,
    num_threads: usize,
    preset: Option<String>,
    isa: Isa,
    huge_pages: bool,
    num_runs: usize,
    tokens: Vec<usize>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = options()?;
    let probe = BandwidthProbe::new(options.num_threads, RUN_BYTES)?;
    let gemm = gemm_rate(options.num_threads);
    let mut pool = ComputePool::with_isa(options.num_threads, None, options.isa)?;
    if !options.json {
        println!(
            "{} threads, {:?}, {} runs; f32 GEMM {:.0} GFLOP/s; medians",
            options.num_threads,
            options.isa,
            options.num_runs,
            gemm / 1e9
        );
        println!(
            "{:<19} {:>16} {:>6} {:>10} {:>7} {:>9} {:>5} {:>11} {:>8} {:>7}",
            "preset",
            "format",
            "tokens",
            "us",
            "GB/s",
            "read GB/s",
            "share",
            "p10..p90",
            "GFLOP/s",
            "of gemm"
        );
    }
    let mut rows = Vec::new();
    for preset in &PRESETS {
        if options.preset.as_ref().is_none_or(|name| name == preset.name) {
            let experts = make_experts(preset, options.huge_pages)?;
            for &tokens in &options.tokens {
                let mut row = measure(&mut pool, &probe, preset, &experts, tokens, &options)?;
                row.of_gemm = row.gflop_per_s * 1e9 / gemm;
                if options.json {
                    rows.push(row.to_json());
                } else {
                    row.print();
                }
            }
        }
    }
    if options.json {
        println!(
            "{{\"num_threads\":{},\"isa\":\"{:?}\",\"huge_pages\":{},\
             \"runs\":{},\"gemm_gflop_per_s\":{:.1},\"rows\":[{}]}}",
            options.num_threads,
            options.isa,
            options.huge_pages,
            options.num_runs,
            gemm / 1e9,
            rows.join(",")
        );
    }
    Ok(())
}

fn options() -> Result<Options, Box<dyn Error>> {
    let mut options = Options {
        json: false,
        num_threads: std::thread::available_parallelism()?.get(),
        preset: None,
        isa: Isa::detect(),
        huge_pages: true,
        num_runs: 25,
        tokens: TOKENS.to_vec(),
    };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value"));
        match arg.as_str() {
            "--json" => options.json = true,
            "--threads" => options.num_threads = value()?.parse()?,
            "--preset" => options.preset = Some(value()?),
            "--runs" => options.num_runs = value()?.parse::<usize>()?.max(1),
            "--tokens" => {
                let numbers = value()?;
                options.tokens = numbers.split(',').map(str::parse).collect::<Result<_, _>>()?;
            }
            "--small-pages" => options.huge_pages = false,
            "--isa" => {
                let name = value()?;
                let found =
                    Isa::ALL.into_iter().find(|isa| format!("{isa:?}").eq_ignore_ascii_case(&name));
                options.isa = found.ok_or(format!("unknown instruction set {name}"))?;
            }
            _ => {
                return Err(format!(
                    "unknown argument {arg}; expected --json, --threads N, --preset NAME, \
                     --tokens N,…, --runs N, --isa NAME or --small-pages"
                )
                .into());
            }
        }
    }
    Ok(options)
}

/// Experts with pseudo-random weights of moderate size, one after another in memory.
fn make_experts(preset: &Preset, huge_pages: bool) -> Result<LayerExperts, Box<dyn Error>> {
    let Preset { hidden, inter, format, .. } = *preset;
    let code_bytes = hidden * inter * format.code_bits() / 8;
    let num_scales =
        |rows, cols| format.scale_shape(rows, cols).map_or(0, |[rows, cols]| rows * cols);
    let scale_bytes = preset.scales.size_bytes().unwrap_or(1);
    let most_scales = num_scales(inter, hidden).max(num_scales(hidden, inter));
    let matrix_bytes = code_bytes + most_scales * scale_bytes;
    let mut memory = MmapMut::map_anon(preset.num_loaded * 3 * matrix_bytes)?;
    memory.advise(if huge_pages { Advice::HugePage } else { Advice::NoHugePage })?;
    let mut random = Random(0x5157_1711);
    for matrix in memory.chunks_exact_mut(matrix_bytes) {
        let (codes, scales) = matrix.split_at_mut(code_bytes);
        fill(format, codes, &mut random);
        // About a thousandth.
        match preset.scales {
            DType::F8E8m0 => scales.fill(117),
            DType::Bf16 => {
                let scale = half::bf16::from_f32(1e-3).to_le_bytes();
                scales.chunks_exact_mut(2).for_each(|value| value.copy_from_slice(&scale));
            }
            _ => scales
                .chunks_exact_mut(4)
                .for_each(|value| value.copy_from_slice(&1e-3f32.to_le_bytes())),
        }
    }
    let memory = Arc::new(memory.make_read_only()?);
    let mut layer = LayerExperts::new(hidden, inter)?;
    for expert in 0..preset.num_loaded {
        let matrix = |idx: usize, rows: usize, cols: usize| {
            let begin = (3 * expert + idx) * matrix_bytes;
            let part = |begin: usize, len: usize| {
                WeightBytes::new(Arc::clone(&memory), |memory| &memory[begin..begin + len])
            };
            let scales = format.scale_shape(rows, cols).map(|_| WeightScales {
                dtype: preset.scales,
                data: part(begin + code_bytes, num_scales(rows, cols) * scale_bytes),
                factor: 1.0,
                minima: Vec::new().into(),
            });
            Weight::new(format, rows, cols, part(begin, code_bytes), scales)
        };
        let weights = ExpertWeights {
            gate: Some(matrix(0, inter, hidden)?),
            up: matrix(1, inter, hidden)?,
            down: matrix(2, hidden, inter)?,
            biases: None,
        };
        layer.insert(expert as u32, Arc::new(weights))?;
    }
    Ok(layer)
}

fn fill(format: WeightFormat, bytes: &mut [u8], random: &mut Random) {
    let mut number = || (random.next() as i32 as f32) / 2f32.powi(31) * 0.05;
    match format {
        WeightFormat::F32 => {
            bytes.chunks_exact_mut(4).for_each(|v| v.copy_from_slice(&number().to_le_bytes()));
        }
        WeightFormat::F16 => bytes
            .chunks_exact_mut(2)
            .for_each(|v| v.copy_from_slice(&half::f16::from_f32(number()).to_le_bytes())),
        WeightFormat::Bf16 => bytes
            .chunks_exact_mut(2)
            .for_each(|v| v.copy_from_slice(&half::bf16::from_f32(number()).to_le_bytes())),
        WeightFormat::F8E4m3 { .. } => bytes.fill_with(|| {
            let byte = random.next() as u8;
            if byte & 0x7f == 0x7f { byte ^ 1 } else { byte }
        }),
        _ => bytes.fill_with(|| random.next() as u8),
    }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32 ^ (self.0 >> 20) as u32
    }
}

/// Medians over the runs.
struct Row {
    preset: &'static str,
    format: WeightFormat,
    tokens: usize,
    seconds: f64,
    gb_per_s: f64,
    read_gb_per_s: f64,
    of_bandwidth: f64,
    of_bandwidth_p10: f64,
    of_bandwidth_p90: f64,
    gflop_per_s: f64,
    of_gemm: f64,
}

/// Measures batches with `tokens` tokens for each active expert. Experts share token rows, as with top-k routing.
fn measure(
    pool: &mut ComputePool,
    probe: &BandwidthProbe,
    preset: &Preset,
    experts: &LayerExperts,
    tokens: usize,
    options: &Options,
) -> Result<Row, Box<dyn Error>> {
    let active = preset.num_active;
    let mut random = Random(7);
    let x: Vec<f32> =
        (0..tokens * preset.hidden).map(|_| random.next() as i32 as f32 / 2f32.powi(31)).collect();
    let entry_token: Vec<u32> = (0..active).flat_map(|_| 0..tokens as u32).collect();
    let entry_weight = vec![1.0 / active as f32; entry_token.len()];
    let mut out = vec![0.0; x.len()];
    let mut first = 0;
    let mut run_batch = || {
        let mut ids: Vec<u32> =
            (first..first + active).map(|id| (id % preset.num_loaded) as u32).collect();
        ids.sort_unstable();
        first += active;
        let groups: Vec<ExpertGroup> = (0u32..)
            .zip(&ids)
            .map(|(idx, &expert)| {
                let begin = idx * tokens as u32;
                ExpertGroup { expert, begin, end: begin + tokens as u32 }
            })
            .collect();
        let batch = LayerBatch {
            x: &x,
            groups: &groups,
            entry_token: &entry_token,
            entry_weight: &entry_weight,
        };
        let start = Instant::now();
        pool.run(experts, &batch, &mut out, &mut || {})?;
        Ok::<f64, Box<dyn Error>>(start.elapsed().as_secs_f64())
    };
    run_batch()?;
    let weights = experts.get(0).ok_or("no experts")?;
    let bytes = (weights.size_bytes() * active) as f64;
    // As many bytes as the probe reads, so that both measure the machine for the same time.
    let batches_per_run = ((RUN_BYTES as f64 / bytes).round() as usize).max(1);
    let (mut times, mut rates, mut bandwidths, mut shares) = (vec![], vec![], vec![], vec![]);
    let mut before = probe.measure(1);
    for _ in 0..options.num_runs {
        let mut seconds = 0.0;
        for _ in 0..batches_per_run {
            let batch_seconds = run_batch()?;
            times.push(batch_seconds);
            seconds += batch_seconds;
        }
        let after = probe.measure(1);
        let rate = bytes * batches_per_run as f64 / seconds;
        let bandwidth = (before + after) / 2.0;
        rates.push(rate / 1e9);
        bandwidths.push(bandwidth / 1e9);
        shares.push(rate / bandwidth);
        before = after;
    }
    let seconds = median(&mut times);
    let flops = 6.0 * (preset.hidden * preset.inter * tokens * active) as f64;
    Ok(Row {
        preset: preset.name,
        format: preset.format,
        tokens,
        seconds,
        gb_per_s: median(&mut rates),
        read_gb_per_s: median(&mut bandwidths),
        of_bandwidth: median(&mut shares),
        of_bandwidth_p10: percentile(&mut shares, 0.1),
        of_bandwidth_p90: percentile(&mut shares, 0.9),
        gflop_per_s: flops / seconds / 1e9,
        of_gemm: 0.0,
    })
}

/// Bytes that a measurement of the bandwidth reads. A run of batches reads about as many.
const RUN_BYTES: usize = 512 << 20;

impl Row {
    fn print(&self) {
        println!(
            "{:<19} {:>16} {:>6} {:>10.1} {:>7.1} {:>9.1} {:>4.0}% {:>4.0}..{:<4.0}% {:>8.1} {:>6.0}%",
            self.preset,
            self.format.to_string(),
            self.tokens,
            self.seconds * 1e6,
            self.gb_per_s,
            self.read_gb_per_s,
            self.of_bandwidth * 100.0,
            self.of_bandwidth_p10 * 100.0,
            self.of_bandwidth_p90 * 100.0,
            self.gflop_per_s,
            self.of_gemm * 100.0,
        );
    }

    fn to_json(&self) -> String {
        format!(
            "{{\"preset\":\"{}\",\"format\":\"{}\",\"tokens_per_expert\":{},\"us_p50\":{:.2},\
             \"gb_per_s_p50\":{:.3},\"read_gb_per_s_p50\":{:.3},\"fraction_of_bandwidth_p50\":{:.4},\
             \"fraction_of_bandwidth_p10\":{:.4},\"fraction_of_bandwidth_p90\":{:.4},\
             \"gflop_per_s\":{:.2},\"fraction_of_gemm\":{:.4}}}",
            self.preset,
            self.format,
            self.tokens,
            self.seconds * 1e6,
            self.gb_per_s,
            self.read_gb_per_s,
            self.of_bandwidth,
            self.of_bandwidth_p10,
            self.of_bandwidth_p90,
            self.gflop_per_s,
            self.of_gemm,
        )
    }
}
