//! The day as a plot: Unicode bars for a terminal, and SVG.

use std::fmt::Write;

/// One row of bars, `width` columns at most. Each column shows the largest of its values over `top`.
pub fn bars(values: &[f64], top: f64, width: usize) -> String {
    const LEVELS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let per_column = values.len().div_ceil(width.max(1)).max(1);
    let level = |part: &[f64]| {
        let value = part.iter().copied().fold(0.0, f64::max);
        let share = if top > 0.0 { (value / top).clamp(0.0, 1.0) } else { 0.0 };
        LEVELS[(share * 8.0).ceil() as usize]
    };
    values.chunks(per_column).map(level).collect()
}

/// Traffic as a line and servers as steps, over hours.
pub fn svg(
    title: &str,
    hours: &[f64],
    rates: &[f64],
    servers: &[f64],
    monolith: Option<f64>,
) -> String {
    const WIDTH: f64 = 900.0;
    const HEIGHT: f64 = 320.0;
    const MARGIN: f64 = 50.0;
    let end = hours.last().copied().unwrap_or(1.0).max(1e-9);
    let largest = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
    let most = largest(servers).max(monolith.unwrap_or(0.0)).max(1.0);
    let peak = largest(rates).max(1e-9);
    let x = |hour: f64| MARGIN + hour / end * (WIDTH - 2.0 * MARGIN);
    let y = |share: f64| HEIGHT - MARGIN - share * (HEIGHT - 2.0 * MARGIN);
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write!(
        text,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n<text x=\"{MARGIN}\" \
         y=\"24\" font-size=\"14\">{}</text>\n",
        escape(title)
    );
    let mut line = |points: String, colour: &str| {
        let _ = writeln!(
            text,
            "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\" points=\"{points}\"/>"
        );
    };
    let mut traffic = String::new();
    let mut steps = String::new();
    for (idx, &hour) in hours.iter().enumerate() {
        let rate = rates.get(idx).copied().unwrap_or(0.0);
        let _ = write!(traffic, "{:.1},{:.1} ", x(hour), y(rate / peak));
        let num = servers.get(idx).copied().unwrap_or(0.0);
        let next = hours.get(idx + 1).copied().unwrap_or(end);
        let _ = write!(
            steps,
            "{:.1},{:.1} {:.1},{:.1} ",
            x(hour),
            y(num / most),
            x(next),
            y(num / most)
        );
    }
    line(traffic, "#888888");
    line(steps, "#0b62a4");
    if let Some(monolith) = monolith {
        let at = y(monolith / most);
        line(format!("{:.1},{at:.1} {:.1},{at:.1}", x(0.0), x(end)), "#c23b22");
    }
    let _ = write!(
        text,
        "<text x=\"{MARGIN}\" y=\"{:.0}\" fill=\"#888888\">traffic, 0 to {peak:.0} tokens/s</text>\n<text x=\"{:.0}\" \
         y=\"{:.0}\" fill=\"#0b62a4\">servers, 0 to {most:.0}</text>\n",
        HEIGHT - 18.0,
        MARGIN + 260.0,
        HEIGHT - 18.0
    );
    if monolith.is_some() {
        let (at, base) = (MARGIN + 420.0, HEIGHT - 18.0);
        let _ = writeln!(
            text,
            "<text x=\"{at:.0}\" y=\"{base:.0}\" fill=\"#c23b22\">monolith for the peak</text>"
        );
    }
    let _ = writeln!(
        text,
        "<text x=\"{:.0}\" y=\"{:.0}\">{end:.0} h</text>\n</svg>",
        WIDTH - MARGIN,
        HEIGHT - 34.0
    );
    text
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_have_the_height_of_their_values() {
        assert_eq!(bars(&[0.0, 1.0, 4.0, 8.0], 8.0, 10), " ▁▄█");
        assert_eq!(bars(&[1.0, 8.0, 2.0, 2.0], 8.0, 2), "█▂");
        assert_eq!(bars(&[], 0.0, 0), "");
    }

    #[test]
    fn a_plot_is_closed_and_its_text_is_escaped() {
        let text = svg("a < b", &[0.0, 1.0], &[1.0, 2.0], &[1.0, 2.0], Some(4.0));
        assert!(text.starts_with("<svg") && text.ends_with("</svg>\n"));
        assert!(text.contains("a &lt; b") && !text.contains("NaN"));
        assert!(!svg("", &[], &[], &[], None).contains("NaN"));
    }
}
