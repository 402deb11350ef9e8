//! Statistics of repeated timings.

/// The statistics of repeated measurements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Stats {
    pub count: usize,
    pub mean: f64,
    /// Standard deviation of the sample (n - 1); zero for one measurement.
    pub sd: f64,
    pub min: f64,
    pub p25: f64,
    pub median: f64,
    pub p75: f64,
    pub p95: f64,
    pub max: f64,
}

impl Stats {
    /// `None` without measurements.
    pub(crate) fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (&min, &max) = (sorted.first()?, sorted.last()?);
        let n = sorted.len() as f64;
        let mean = sorted.iter().sum::<f64>() / n;
        let squares: f64 = sorted.iter().map(|x| (x - mean).powi(2)).sum();
        let sd = if sorted.len() > 1 { (squares / (n - 1.0)).sqrt() } else { 0.0 };
        let quantile = |q| quantile(&sorted, q);
        let (p25, median, p75, p95) =
            (quantile(0.25), quantile(0.5), quantile(0.75), quantile(0.95));
        Some(Stats { count: sorted.len(), mean, sd, min, p25, median, p75, p95, max })
    }

    /// Coefficient of variation: standard deviation over mean.
    pub(crate) fn cv(&self) -> f64 {
        if self.mean == 0.0 { 0.0 } else { self.sd / self.mean }
    }
}

/// Linear interpolation between the two nearest ranks, as NumPy's default.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let position = q * (sorted.len() - 1) as f64;
    let (low, high) = (position.floor() as usize, position.ceil() as usize);
    sorted[low] + (sorted[high] - sorted[low]) * (position - low as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_one_to_five() {
        let s = Stats::of(&[5.0, 1.0, 4.0, 2.0, 3.0]).unwrap();
        assert_eq!((s.count, s.min, s.max), (5, 1.0, 5.0));
        assert_eq!((s.mean, s.median, s.p25, s.p75), (3.0, 3.0, 2.0, 4.0));
        assert!((s.p95 - 4.8).abs() < 1e-12 && (s.sd - 2.5f64.sqrt()).abs() < 1e-12);
        assert!((s.cv() - 2.5f64.sqrt() / 3.0).abs() < 1e-12);
    }

    #[test]
    fn of_few() {
        assert_eq!(Stats::of(&[]), None);
        let s = Stats::of(&[2.0]).unwrap();
        assert_eq!((s.median, s.p95, s.sd, s.cv()), (2.0, 2.0, 0.0, 0.0));
        assert_eq!(Stats::of(&[0.0, 0.0]).unwrap().cv(), 0.0);
        assert_eq!(Stats::of(&[1.0, 2.0]).unwrap().median, 1.5);
    }
}
