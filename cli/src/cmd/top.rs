//! `switchyard top`: the fleet live in a terminal.

mod view;

use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use control_api::{ControlClient, ControlError};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use tokio::signal::unix::{SignalKind, signal};

use self::view::{History, Order, Screen, Snapshot};
use super::status::exit_code;
use crate::{Global, ui};

/// Options of `top`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    control: super::ControlArgs,
    /// Time between two looks at the fleet, in milliseconds, 100 to 60000.
    #[arg(
        long,
        env = "SWITCHYARD_INTERVAL_MS",
        default_value_t = 1000,
        value_parser = clap::value_parser!(u64).range(100..=60_000)
    )]
    interval_ms: u64,
    /// Print one picture and end, for scripts. Without a terminal this is always so. The exit code is that of `status`.
    #[arg(
        long,
        env = "SWITCHYARD_ONCE",
        value_parser = clap::builder::FalseyValueParser::new()
    )]
    once: bool,
    /// Order of the servers.
    #[arg(long, env = "SWITCHYARD_ORDER", default_value = "name")]
    order: Order,
}

pub fn run(global: &Global, args: Args) -> Result<ExitCode> {
    let url = &args.control.required_url()?;
    let client = args.control.client(url)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let look = || runtime.block_on(snapshot(&client));
    if global.json {
        let Snapshot { status, members } = look()?;
        let (health, problems) = status.health();
        ui::print_json(&serde_json::json!({
            "health": health.as_str(), "problems": problems, "status": status, "members": members
        }))?;
        return Ok(exit_code(health));
    }
    if args.once || !std::io::stdout().is_terminal() {
        let snapshot = look()?;
        let mut history = History::default();
        history.add(&snapshot);
        outln!("{}", picture(url, &snapshot, &history, args.order)?);
        return Ok(exit_code(snapshot.status.health().0));
    }
    // The first look, before the screen changes: an error stays readable.
    let first = look()?;
    let is_over = end_by_signal()?;
    let mut terminal = ratatui::try_init().context("cannot use this terminal")?;
    let result = live(&mut terminal, url, first, look, &args, &is_over);
    ratatui::try_restore().context("cannot restore the terminal")?;
    result.map(|()| ExitCode::SUCCESS)
}

async fn snapshot(client: &ControlClient) -> Result<Snapshot, ControlError> {
    let status = client.status().await?;
    Ok(Snapshot { status, members: client.members().await? })
}

/// A flag that is true once a signal asks this process to end. The picture then has to leave the terminal first.
fn end_by_signal() -> Result<Arc<AtomicBool>> {
    let is_over = Arc::new(AtomicBool::new(false));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    // The handlers are in place when this returns.
    let signals = {
        let _entered = runtime.enter();
        let shutdown = super::shutdown_signal()?;
        let mut hangup = signal(SignalKind::hangup()).context("cannot handle signals")?;
        async move {
            tokio::select! {
                () = shutdown => {}
                _ = hangup.recv() => {}
            }
        }
    };
    let seen = Arc::clone(&is_over);
    std::thread::spawn(move || {
        runtime.block_on(signals);
        seen.store(true, Ordering::Relaxed);
    });
    Ok(is_over)
}

/// Draws until the user quits, or until `is_over`. A control plane that does not answer is shown, and asked again.
fn live(
    terminal: &mut ratatui::DefaultTerminal,
    url: &str,
    mut snapshot: Snapshot,
    look: impl Fn() -> Result<Snapshot, ControlError>,
    args: &Args,
    is_over: &AtomicBool,
) -> Result<()> {
    let interval = Duration::from_millis(args.interval_ms);
    let (mut history, mut order, mut offset) = (History::default(), args.order, 0usize);
    history.add(&snapshot);
    let mut failure = None;
    let mut due = Instant::now() + interval;
    loop {
        offset = offset.min(snapshot.members.len().saturating_sub(1));
        let screen = Screen {
            url,
            snapshot: &snapshot,
            history: &history,
            order,
            offset,
            failure: failure.as_deref(),
            is_live: true,
        };
        terminal.draw(|frame| screen.draw(frame)).context("cannot draw")?;
        let wait = due.saturating_duration_since(Instant::now()).min(SIGNAL_PERIOD);
        if event::poll(wait).context("cannot read keys")? {
            let Event::Key(key) = event::read().context("cannot read keys")? else { continue };
            if key.kind != KeyEventKind::Press {
                continue;
            }
            match key.code {
                KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
                KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => {
                    return Ok(());
                }
                KeyCode::Char('o') => order = order.next(),
                KeyCode::Down | KeyCode::Char('j') => offset += 1,
                KeyCode::Up | KeyCode::Char('k') => offset = offset.saturating_sub(1),
                KeyCode::PageDown => offset += PAGE,
                KeyCode::PageUp => offset = offset.saturating_sub(PAGE),
                KeyCode::Home => offset = 0,
                KeyCode::End => offset = usize::MAX,
                _ => {}
            }
            continue;
        }
        if is_over.load(Ordering::Relaxed) {
            return Ok(());
        }
        if Instant::now() < due {
            continue;
        }
        due = Instant::now() + interval;
        match look() {
            Ok(found) => {
                history.add(&found);
                (snapshot, failure) = (found, None);
            }
            Err(error) => failure = Some(error.to_string()),
        }
    }
}

/// One picture as text, without colours, with a line for every problem and every server.
fn picture(url: &str, snapshot: &Snapshot, history: &History, order: Order) -> Result<String> {
    let screen = Screen { url, snapshot, history, order, offset: 0, failure: None, is_live: false };
    let height = screen.num_lines();
    let mut terminal = Terminal::new(TestBackend::new(PICTURE_WIDTH, height))?;
    terminal.draw(|frame| screen.draw(frame))?;
    let buffer = terminal.backend().buffer();
    let lines = (0..height).map(|y| {
        let line: String = (0..PICTURE_WIDTH).map(|x| buffer[(x, y)].symbol()).collect();
        line.trim_end().to_owned()
    });
    Ok(lines.collect::<Vec<_>>().join("\n").trim_end().to_owned())
}

/// Time between two looks at the signals.
const SIGNAL_PERIOD: Duration = Duration::from_millis(100);
/// Servers that a key turns.
const PAGE: usize = 10;
/// Columns of a picture for scripts.
const PICTURE_WIDTH: u16 = 120;
