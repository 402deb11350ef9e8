//! Today's date.

use std::time::{SystemTime, UNIX_EPOCH};

/// Today in UTC as `YYYY-MM-DD`.
pub(crate) fn today() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    format_day(seconds / 86400)
}

/// The date so many days after 1970-01-01.
fn format_day(days: u64) -> String {
    let leap = |y: u64| y.is_multiple_of(4) && (!y.is_multiple_of(100) || y.is_multiple_of(400));
    let (mut year, mut day) = (1970, days);
    while day >= 365 + u64::from(leap(year)) {
        day -= 365 + u64::from(leap(year));
        year += 1;
    }
    let months = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while day >= months[month] {
        day -= months[month];
        month += 1;
    }
    format!("{year}-{:02}-{:02}", month + 1, day + 1)
}

#[cfg(test)]
mod tests {
    use super::format_day;

    #[test]
    fn known_days() {
        assert_eq!(format_day(0), "1970-01-01");
        assert_eq!(format_day(11016), "2000-02-29");
        assert_eq!(format_day(20088), "2024-12-31");
        assert_eq!(format_day(20454), "2026-01-01");
    }
}
